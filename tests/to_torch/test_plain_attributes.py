"""Attributes that a call of a JAX model changes are named, and are as they were."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import fmapper

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Tally:
    def __init__(self):
        self.count = 1


class CountsInNNX(nnx.Module):
    def __init__(self):
        self.calls, self.tally, self.seen = 0, Tally(), []

    def __call__(self, x):
        self.calls += 1
        self.tally.count += 1
        self.seen.append(self.calls)
        return x * self.calls * self.tally.count * len(self.seen)


class Block(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([CountsInNNX()])

    def __call__(self, x):
        return self.layers[0](x)


class CountsInEquinox(eqx.Module):
    seen: list
    tally: Tally = eqx.field(static=True)

    def __call__(self, x):
        self.seen.append(1)
        self.tally.count += 1
        return x * len(self.seen) * self.tally.count


class CountsInLinen(linen.Module):
    tally: Tally

    def __call__(self, x):
        self.tally.count += 1
        return x * self.tally.count


def count_in_closure():
    calls, weight = 0, jnp.ones(3)

    def f(x):
        nonlocal calls
        calls += 1
        return x * weight * calls

    return f


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (CountsInNNX, "calls, tally.count, seen"),
        (Block, r"layers.0.calls, layers.0.tally.count, layers.0.seen"),
        (lambda: CountsInEquinox([], Tally()), "seen, tally.count"),
        (lambda: (CountsInLinen(Tally()), {}), "tally.count"),
        (count_in_closure, "calls"),
    ],
    ids=["nnx", "nnx-nested", "equinox", "linen", "function"],
)
def test_attributes_that_a_call_changes_are_named_and_as_they_were(make, names):
    model = make()
    with pytest.warns(fmapper.ConversionWarning, match=f"a call changes {names}, "):
        converted = fmapper.convert(model, "torch", (X,))
    call = (lambda x: model[0].apply({}, x)) if isinstance(model, tuple) else model
    expected = call(jnp.asarray(X))  # it would be another number had a call changed the model
    found = converted(fmapper.to_torch(X)).detach()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class Average(nnx.Module):
    def __init__(self):
        self.mean = nnx.data(jnp.zeros(3))

    def __call__(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


def test_arrays_of_a_module_are_buffers_and_need_no_warning():
    model = Average()
    converted = fmapper.convert(model, "torch", (X,), train=True)
    for _ in range(2):
        np.testing.assert_allclose(converted(fmapper.to_torch(X)), model(X), rtol=1e-6)


def test_what_a_call_leaves_behind_in_a_list_is_removed_although_it_fails():
    seen, weight = [], jnp.ones(3)

    def f(x):
        seen.append(jax.numpy.sum(x * weight))
        return x

    with pytest.raises(fmapper.ConversionError, match=r"makes seen\.0"):
        fmapper.convert(f, "torch", (X,))
    assert seen == []
