"""Layers of torch in files for models of JAX: norms, convolutions, and stacked layers."""

from __future__ import annotations

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")
eqx = pytest.importorskip("equinox")
jnp, lax = jax.numpy, jax.lax

from fmapper.translation.source import translate, translate_proved  # noqa: E402
from support.written import normal, written  # noqa: E402


def agree(model, *args, shapes=None):
    source, net, _ = written(model, *args, shapes=shapes)
    given = [torch.from_numpy(np.array(x)).requires_grad_() for x in args]
    want, got = jax.tree.leaves(model(*args)), jax.tree.leaves(net(*given))
    assert len(want) == len(got) > 0
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-4, atol=1e-5)
    factors = [np.cos(np.arange(y.size)).reshape(y.shape).astype("float32") for y in want]
    sum(
        (y * torch.from_numpy(np.array(w))).sum() for y, w in zip(got, factors, strict=True)
    ).backward()

    def loss(own, *xs):
        return sum((y * w).sum() for y, w in zip(jax.tree.leaves(own(*xs)), factors, strict=True))

    grad = nnx.grad if isinstance(model, nnx.Module) else eqx.filter_grad
    slope = grad(lambda x, own: loss(own, x))(args[0], model)
    scale = float(jnp.abs(slope).max())
    np.testing.assert_allclose(given[0].grad, slope, rtol=1e-3, atol=1e-4 * scale)
    return source


# --- norms and convolutions -----------------------------------------------------------------------


class Holder(nnx.Module):
    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        return self.part(x) + 1


class Vision(eqx.Module):
    conv: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    norm: eqx.nn.GroupNorm

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(3, 8, 3, padding=1, groups=1, key=a)
        self.up = eqx.nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1, key=b)
        self.norm = eqx.nn.GroupNorm(2, 4)

    def __call__(self, x):
        return self.norm(jnp.tanh(self.up(jnp.tanh(self.conv(x)))))


# --- lists ----------------------------------------------------------------------------------------


class Unit(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + jnp.tanh(linen.Dense(8)(linen.LayerNorm()(x)))


class Tower(linen.Module):
    def setup(self):
        self.units = [Unit() for _ in range(3)]

    def __call__(self, x):
        for unit in self.units:
            x = unit(x)
        return x


class Towers(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = Tower()(x)
        return linen.Dense(3)(linen.Dense(5)(x))


@pytest.mark.nightly
def test_numbered_submodules_are_lists():
    model = Towers()
    source = agree(model.bind(model.init(jax.random.key(0), x := normal(2, 8))), x)
    place = source.weights.arrays["towers.1.units.2.Dense_0.weight"]
    assert (place.name, place.order) == ("Tower_1.units_2.Dense_0.kernel", (1, 0))


# --- stacked layers -------------------------------------------------------------------------------


class Mixer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.inner = Holder(nnx.Linear(8, 8, rngs=rngs))

    def __call__(self, x):
        return x + jnp.tanh(self.inner(self.norm(x)))


class Stacked(nnx.Module):
    def __init__(self, rngs, *, remat=False):
        self.remat = remat

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Mixer(rngs)

        self.blocks = make(rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        step = nnx.remat(Mixer.__call__) if self.remat else Mixer.__call__

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return step(block, x)

        return self.head(run(x, self.blocks))


def stacked_weights():
    return {"w": normal(4, 8, 8) / 3, "b": normal(4, 8, seed=1)}


def layer(x, block):
    return x + jnp.tanh(x @ block["w"] + block["b"]), None


def whole(params, x):
    return lax.scan(layer, x, params["blocks"])[0]


def backwards(params, x):
    return lax.scan(layer, x, params["blocks"], reverse=True)[0]


def shared(params, x):
    return lax.scan(layer, x, params["blocks"])[0] @ params["blocks"]["w"][0]


def twice(params, x):
    x, _ = lax.scan(layer, x, params["blocks"])
    return lax.scan(layer, x, params["blocks"])[0]


def nested(params, x):
    def group(x, blocks):
        return lax.scan(layer, x, blocks)[0], None

    return lax.scan(group, x, params["blocks"])[0]


@pytest.mark.nightly_cases("shared", "backwards", "whole", "nested")
@pytest.mark.parametrize("function", [whole, backwards, shared, twice, nested])
def test_stacked_arrays_of_functions(function):
    blocks = stacked_weights()
    if function is nested:
        blocks = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), blocks)
    model = functools.partial(function, {"blocks": blocks})
    _source, net, _ = written((function, {"blocks": blocks}), x := normal(3, 8), shapes=None)
    np.testing.assert_allclose(
        net(torch.tensor(np.array(x))).detach(), model(x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.nightly
def test_rows_that_belong_to_steps_of_time_stay_a_loop():
    def run(params, xs):
        def step(h, x):
            x, place = x
            h = jnp.tanh(h @ params["w"] + x + place)
            return h, h

        return lax.scan(step, jnp.zeros(8), (xs, params["places"]))[1]

    params = {"w": normal(8, 8), "places": normal(5, 8)}
    _source, net, _ = written((run, params), x := normal(5, 8), shapes=None)
    np.testing.assert_allclose(
        net(torch.tensor(np.array(x))).detach(), run(params, x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.nightly
@pytest.mark.parametrize("make", [
    lambda: (Stacked(nnx.Rngs(0)), normal(2, 4, 8)),
    lambda: (Vision(jax.random.key(0)), normal(3, 5, 6)),
])  # fmt: skip
def test_files_are_proved(make):
    model, x = make()
    _, _, proof = translate(model, "torch", (x,), {}, None, proved=True)
    assert proof, str(proof)


class Shared(nnx.Module):
    """Multiplies by a kernel as a matrix, twice."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, 3, 2, 4)))

    def __call__(self, x):
        matrix = self.kernel[...].reshape(18, 4)
        return x @ matrix, jnp.ones((2, 4)) @ matrix.T


@pytest.mark.nightly
def test_an_array_that_two_products_share_is_no_layer():
    x = jnp.cos(jnp.arange(54.0)).reshape(3, 18)
    _source, proof, reason = translate_proved(Shared(nnx.Rngs(0)), "torch", (x,))
    assert proof, reason


@pytest.mark.nightly
def test_images_without_gradients_are_normalised_in_groups():
    model = linen.GroupNorm(2)
    x = normal(2, 9, 9, 4)
    _, proof, reason = translate_proved((model, model.init(jax.random.key(0), x)), "torch", (x,))
    assert proof, reason
