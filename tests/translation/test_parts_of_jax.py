"""Parts of JAX models that a transformation calls: they are parts of the file, too."""

from __future__ import annotations

import functools
import types

import pytest

import fmapper

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")
jnp = jax.numpy

from fmapper.programs import Input  # noqa: E402
from fmapper.programs.steps import Auto  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402

pytestmark = pytest.mark.nightly


class Head(eqx.Module):
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(6)
        self.linear = eqx.nn.Linear(6, 2, use_bias=False, key=key)
        self.bias = jnp.ones(2)

    def __call__(self, x):
        return self.linear(self.norm(x)) + self.bias


class Deep(eqx.Module):
    """Blocks whose arrays are stacked, with numbered parts in them."""

    blocks: eqx.nn.MLP
    head: Head

    def __init__(self, key):
        first, second = jax.random.split(key)
        make = eqx.filter_vmap(lambda one: eqx.nn.MLP(6, 6, 8, 1, key=one))
        self.blocks = make(jax.random.split(first, 3))
        self.head = Head(second)

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, row: (eqx.combine(row, static)(x), None), x, arrays)
        return self.head(x)


def test_parts_of_a_model_under_vmap_are_classes_and_layers():
    model = Deep(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 6))
    _source, _, proof = translate(jax.vmap(model), "torch", (x,), proved=True)
    assert proof, str(proof)  # by name: the arrays of blocks are rows of stacked ones

    there = fmapper.convert(jax.vmap(model), "torch", (x,), structure=True)
    given = fmapper.to_torch(x)
    wanted = fmapper.to_torch(jax.vmap(model.head.linear)(x))
    torch.testing.assert_close(there.head.linear(given), wanted)
    torch.testing.assert_close(there.head(given), fmapper.to_torch(jax.vmap(model.head)(x)))


class Tagger(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs))
        self.second = nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs))

    def __call__(self, x):
        return self.second(self.first(x))


def test_a_part_gives_what_it_gives_in_the_source():
    model = Tagger(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 5, 3))
    there = fmapper.convert(model, "torch", (x,), structure=True)
    hidden, _ = there.first(fmapper.to_torch(x))
    torch.testing.assert_close(hidden, fmapper.to_torch(model.first(x)))
    torch.testing.assert_close(there.second(hidden)[0], fmapper.to_torch(model(x)))


class Gate(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, state, scale, x):
        gate = nnx.sigmoid(self.linear(x))
        return gate * x * scale + (1 - gate) * state


class Filled(nnx.Module):
    def __init__(self, rngs):
        self.gate = Gate(rngs)

    def __call__(self, x):
        return self.gate(jnp.zeros_like(x), jnp.ones(x.shape[-1:]), x)


def test_a_part_reads_arguments_that_the_model_fills_with_one_number():
    model = Filled(nnx.Rngs(0))
    state, scale, x = jax.random.normal(jax.random.key(1), (3, 4, 3))
    there = fmapper.convert(model, "torch", (x,), structure=True)
    torch.testing.assert_close(there(fmapper.to_torch(x)), fmapper.to_torch(model(x)))
    given = map(fmapper.to_torch, (state, scale[0], x))
    wanted = fmapper.to_torch(model.gate(state, scale[0], x))
    torch.testing.assert_close(there.gate(*given), wanted)


class Encoder(linen.Module):
    @functools.partial(
        linen.scan, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
    )
    @linen.compact
    def __call__(self, carry, x):
        return linen.OptimizedLSTMCell(4)(carry, x)


class Classifier(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        carry = jnp.zeros((tokens.shape[0], 4)), jnp.zeros((tokens.shape[0], 4))
        _, ys = Encoder()(carry, tokens)
        return linen.Dense(2, name="head")(ys[:, -1])


def test_a_model_has_its_arguments_where_a_loop_begins_parts_that_end_outside():
    model = Classifier()
    x = jax.random.normal(jax.random.key(1), (2, 5, 3))
    variables = model.init(jax.random.key(0), x)
    _source, _, proof = translate((model, variables), "torch", (x,), proved=True)
    assert proof, str(proof)


class Images(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 2, (3, 3), rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(self.conv(x), (2, 2), strides=(2, 2))
        return nnx.avg_pool(x, (2, 3), strides=(2, 1), padding=((1, 1), (0, 0)))


def test_a_mean_of_windows_is_average_pooling():
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 1))
    _source, _, proof = translate(Images(nnx.Rngs(0)), "torch", (x,), proved=True)
    assert proof, str(proof)


class Scaled(eqx.Module):
    held: list
    linear: eqx.nn.Linear

    def __call__(self, x):
        count, (mean, scale) = self.held
        return self.linear((x - mean / count) / scale)


def test_a_list_has_arrays_and_lists_of_them():
    held = [jnp.array(3), (jnp.ones(4), 2 * jnp.ones(4))]
    model = Scaled(held, eqx.nn.Linear(4, 2, key=jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (5, 4))
    there = fmapper.convert(jax.vmap(model), "torch", (x,), structure=True)
    torch.testing.assert_close(there(fmapper.to_torch(x)), fmapper.to_torch(jax.vmap(model)(x)))
    assert {"held.0", "held.1.0", "held.1.1"} <= there.state_dict().keys()


def test_a_narrower_recording_begins_with_the_sizes_of_the_first():
    shapes = [("n", 16), ("n", 3, "m"), (2,)]
    inputs = [Input("user", "", "float32", shape) for shape in shapes]
    program = types.SimpleNamespace(inputs=inputs)
    found = Auto.but({(1, 2): "it is asked for"}, program)
    assert found == "auto"
    assert found.names == {(0, 0): "n", (1, 0): "n"}
    assert found.fixed == {(0, 1): "", (1, 1): "", (1, 2): "it is asked for", (2, 0): ""}


class Noisy(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x) + jax.random.normal(self.make_rng("latent"), (3,))


def test_a_model_with_classes_takes_keys_of_linen_by_name():
    model, x = Noisy(), jnp.ones((2, 4))
    keys = {"params": jax.random.key(0), "latent": jax.random.key(1)}
    variables = model.init(keys, x)
    kwargs = {"rngs": {"latent": keys["latent"]}}
    there = fmapper.convert((model, variables), "torch", (x,), kwargs, structure=True)
    key = fmapper.to_torch(jax.random.key_data(keys["latent"]))
    wanted = fmapper.to_torch(model.apply(variables, x, **kwargs))
    torch.testing.assert_close(there(fmapper.to_torch(x), rngs_latent=key), wanted)
