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

from fmapper.translation.source import translate, translate_proved  # noqa: E402
from support.written import written  # noqa: E402

pytestmark = pytest.mark.nightly


def body(code: str, name: str) -> str:
    """Returns the code of a class."""
    return code.split(f"class {name}(nn.Module)")[1].split("\n\n\n", maxsplit=1)[0]


def agree(net: Any, model: Any, *args: Any) -> None:
    """Asserts that a module of torch gives what a model of JAX does."""
    found = net(*[torch.from_numpy(np.array(x)) for x in args])
    wanted = jax.tree.leaves(model(*args))
    for ours, theirs in zip(jax.tree.leaves(found), wanted, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-6)


class TwoTowers(linen.Module):
    @linen.compact
    def __call__(self, image, text):
        x = linen.Conv(4, (3, 3), strides=(2, 2))(image).mean((1, 2))
        t = linen.Embed(10, 4)(text)
        return x @ t.mean(1).T


def test_sizes_of_one_input_vary_where_those_of_another_cannot():
    image, text = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 5), jnp.int32)
    model = TwoTowers()
    variables = model.init(jax.random.key(0), image, text)
    source, _, _ = translate((model, variables), "torch", (image, text), {}, "auto", True)
    assert '(text, "batch_2 length")' in source.code.replace("'", '"')


class Graph(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, h, positions, senders, receivers):
        apart = positions[senders] - positions[receivers]
        total = jax.ops.segment_sum(apart, receivers, positions.shape[0])
        most = jax.ops.segment_max(apart, receivers, positions.shape[0])
        return self.up(h), total, most


def test_rows_whose_size_varies_are_chosen_and_summed_by_the_helpers():
    model = Graph(nnx.Rngs(0))
    at = jnp.array([0, 2, 5, -1, 9])
    h, positions = jnp.ones((6, 4)), jax.random.normal(jax.random.key(1), (6, 3))
    source, net, _ = written(model, h, positions, at, at[::-1])
    code = body(source.code, "Graph")
    assert "take_rows(positions, senders) - take_rows(positions, receivers)" in code
    assert "segment_sum(apart, receivers, " in code
    assert "segment_max(apart, receivers, " in code
    assert "flatten" not in code
    for count, width in ((6, 3), (7, 2)):
        positions = jax.random.normal(jax.random.key(2), (count, width))
        agree(net, model, h, positions, at, at[::-1])


class Chosen(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(9, 4, rngs=rngs)

    def __call__(self, tokens, actions):
        rows = jnp.arange(tokens.shape[0])
        x = self.embed(tokens)
        return x[rows, jnp.argmax(tokens, axis=-1)], x[rows, actions]


def test_all_positions_of_a_dimension_are_indices_as_they_are():
    model = Chosen(nnx.Rngs(0))
    for shapes in ("auto", None):
        tokens = jax.random.randint(jax.random.key(0), (4, 5), 0, 9)
        actions = jnp.array([0, -1, 2, 9])
        source, net, _ = written(model, tokens, actions, shapes=shapes)
        code = body(source.code, "Chosen")
        assert code.count("torch.clamp") == 1  # of actions
        assert "torch.argmax(tokens, 1)]" in code
        agree(net, model, tokens, actions)


class Bounded(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.float32(2.0))
        self.up = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, a, b):
        h = self.up(a)
        apart = jnp.maximum(h, b) - jnp.minimum(h, b)
        return apart * jnp.exp(jnp.minimum(self.scale, jnp.log(100.0)))


class Inverse(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, a, b):
        return self.up(a), 1 / jnp.minimum(a, b)


def test_extremes_keep_the_sign_of_a_zero_only_where_it_is_seen():
    a, b = jnp.array([[1.0, -2.0, 0.0, -0.0]]), jnp.array([[0.5, 3.0, -0.0, 0.0]])
    model = Bounded(nnx.Rngs(0))
    source, net, _ = written(model, a, b)
    code = body(source.code, "Bounded")
    assert "torch.minimum(h, b)" in code
    assert "torch.maximum(h, b)" in code
    assert "detach" not in code
    assert "-torch" not in code
    agree(net, model, a, b)
    model = Inverse(nnx.Rngs(0))
    source, net, _ = written(model, a, b)
    assert "detach" in body(source.code, "Inverse")
    agree(net, model, a, b)


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
    assert source.code.count("class Noisy") == 1
    assert "frombuffer" not in source.code
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
