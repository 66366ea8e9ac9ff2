"""Associative scans of JAX in files for torch: loops over any length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fmapper
from fmapper.translation.source import translate_proved
from fmapper_adapters.jax.record.parts.scans import record_loops

eqx = pytest.importorskip("equinox")


def linear(before, now):
    return before[0] * now[0], now[0] * before[1] + now[1]


class Recurrent(eqx.Module):
    gate: eqx.nn.Linear
    inner: eqx.nn.Linear

    def __init__(self, key):
        one, other = jax.random.split(key)
        self.gate = eqx.nn.Linear(3, 4, key=one)
        self.inner = eqx.nn.Linear(3, 4, key=other)

    def __call__(self, x):
        a = jax.nn.sigmoid(jax.vmap(self.gate)(x))
        b = jax.vmap(self.inner)(x)
        _, h = jax.lax.associative_scan(linear, (a, b))
        return h


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.nightly
def test_a_recurrence_is_a_loop_over_any_length():
    model = jax.vmap(Recurrent(jax.random.key(0)))
    source, proof, _ = translate_proved(model, "torch", (normal(1, 2, 7, 3),))
    assert proof, proof
    code = source.code.partition("class Recurrent")[2]
    code.partition("        for ")[2].partition("torch.stack")[0]
    space = {}
    exec(source.code, space)
    net = space[source.name]()
    weights = fmapper.state(model.__wrapped__)
    space["load_weights"](net, {name: np.array(x) for name, x in weights.items()})
    for length in (1, 2, 12):
        x = normal(length, 3, length, 3)
        got = net(torch.from_numpy(np.array(x)))
        np.testing.assert_allclose(got.detach(), model(x), rtol=1e-5, atol=1e-6)


FUNCTIONS = [
    linear,
    lambda a, b: (a[0] + b[0], a[1] * b[1]),
    lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]),  # no number of ours: it is JAX's own
]


@pytest.mark.nightly_cases(
    "<lambda>-0_0-True",
    "<lambda>-2_0-False",
    "<lambda>-0_1-True",
    "linear-0_1-True",
    "linear-0_0-True",
    "linear-1-True",
    "linear-2-True",
    "linear-0_0-False",
    "linear-0_1-False",
    "linear-1-False",
    "linear-2-False",
)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("function", "axis"),
    [(jax.vmap(linear), 0), *((one, axis) for one in FUNCTIONS for axis in (0, 1, 2))],
)
def test_loops_give_what_scans_give(function, axis, reverse):
    given = normal(1, 5, 4, 3), normal(2, 5, 4, 3)

    def scan(*xs):
        return jax.lax.associative_scan(function, xs, reverse=reverse, axis=axis)

    want = scan(*given)
    with record_loops(wanted=True):
        got = scan(*given)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("function", [jnp.maximum, jnp.minimum, jnp.add, jnp.multiply])
@pytest.mark.parametrize("sign", [1, -1])
def test_elements_of_one_number_are_not_taken_for_others(function, sign):
    x = sign * (jnp.arange(5.0) + 2)
    wanted = jax.lax.associative_scan(function, x)
    with record_loops(wanted=True):
        np.testing.assert_array_equal(jax.lax.associative_scan(function, x), wanted)
        rows = jax.vmap(lambda x: jax.lax.associative_scan(function, x))(x[None])
    np.testing.assert_array_equal(rows[0], wanted)


@pytest.mark.nightly
def test_a_scan_that_names_its_constants_is_one_too():
    scale = normal(3, 4)

    def f(x):
        return jax.lax.associative_scan(lambda a, b: a + b * scale / scale, x)

    with record_loops(wanted=True):
        np.testing.assert_allclose(f(normal(1, 5, 4)), f(normal(1, 5, 4)))
    assert jax.lax.associative_scan.__module__.startswith("jax.")


@pytest.mark.nightly
def test_powers_of_sizes_are_products():
    def model(image):
        side = image.shape[0]
        return jnp.sum(image.reshape(side * side) * jnp.arange(side**2))

    _source, proof, _ = translate_proved(model, "torch", (normal(1, 4, 4),))
    assert proof, proof
