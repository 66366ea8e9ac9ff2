"""Sizes that need not be fixed, rows of sizes that vary, and extremes, in files for torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

from fmapper.translation.source import translate_proved  # noqa: E402
from support.written import written  # noqa: E402

pytestmark = pytest.mark.nightly


def agree(net: Any, model: Any, *args: Any) -> None:
    """Asserts that a module of torch gives what a model of JAX does."""
    found = net(*[torch.from_numpy(np.array(x)) for x in args])
    wanted = jax.tree.leaves(model(*args))
    for ours, theirs in zip(jax.tree.leaves(found), wanted, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-6)


class Noisy(nnx.Module):
    def __init__(self, width, out, rngs):
        self.up = nnx.Linear(width, out, rngs=rngs)
        self.noise = nnx.BatchStat(jax.random.normal(rngs.noise(), (width,)))

    def __call__(self, x):
        return self.up(x * self.noise[...])


class Agent(nnx.Module):
    def __init__(self, rngs):
        self.low = Noisy(12, 16, rngs)
        self.high = Noisy(16, 3, rngs)

    def __call__(self, x):
        return self.high(nnx.relu(self.low(x)))


def test_arrays_that_the_source_has_are_left_to_load_weights():
    x = jax.random.normal(jax.random.key(1), (2, 12))
    source, proof, _ = translate_proved(Agent(nnx.Rngs(0, noise=1)), "torch", (x,))
    assert proof
    namespace: dict[str, Any] = {}
    exec(source.code, namespace)
    state = {key: np.zeros(value.shape, "float32") for key, value in
             namespace["Agent"]().state_dict().items()}  # fmt: skip
    del state["low.noise"]
    with pytest.raises(ValueError, match=r"low\.noise"):
        namespace["load_weights"](namespace["Agent"](), state)


class Attention(linen.Module):
    heads: int = 2

    @linen.compact
    def __call__(self, x, xa=None, mask=None):
        q = linen.Dense(8, name="query")(x)
        source = x if xa is None else xa
        k = linen.Dense(8, use_bias=False, name="key")(source)
        v = linen.Dense(8, name="value")(source)
        q, k, v = (one.reshape(*one.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)
                   for one in (q, k, v))  # fmt: skip
        weights = q @ k.swapaxes(-1, -2)
        weights = linen.softmax(weights if mask is None else weights + mask)
        found = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        return linen.Dense(8, name="out")(found)


class Block(linen.Module):
    is_cross: bool = False

    @linen.compact
    def __call__(self, x, xa=None, mask=None):
        x = x + Attention(name="attn")(linen.LayerNorm(name="norm")(x), mask=mask)
        if self.is_cross:
            x = x + Attention(name="cross")(linen.LayerNorm(name="cross_norm")(x), xa)
        return x


class Speech(linen.Module):
    @linen.compact
    def __call__(self, sound, text):
        heard = Block(name="encoder")(sound)
        mask = jnp.triu(jnp.full((text.shape[1],) * 2, -jnp.inf), 1)
        return Block(True, name="decoder")(text, heard, mask)


def test_what_stands_in_for_an_argument_stands_where_that_is_given():
    keys = jax.random.split(jax.random.key(0), 3)
    sound, text = jax.random.normal(keys[0], (2, 10, 8)), jax.random.normal(keys[1], (2, 6, 8))
    model = Speech()
    variables = model.init(keys[2], sound, text)
    _, net, _ = written((model, variables), sound, text, shapes=None)
    agree(net, lambda *args: model.apply(variables, *args), sound, text)
