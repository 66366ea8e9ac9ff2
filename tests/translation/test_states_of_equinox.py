"""Models of Equinox with a state that they take and give: files for torch have it in buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fmapper
from fmapper.translation.source import translate_proved
from fmapper_adapters.jax.record import states

eqx = pytest.importorskip("equinox")


class Block(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(self, inputs, outputs, mode, key):
        self.conv = eqx.nn.Conv2d(inputs, outputs, 3, padding=1, key=key)
        self.norm = eqx.nn.BatchNorm(outputs, axis_name="batch", momentum=0.9, mode=mode)

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        return jax.nn.relu(x), state


class Net(eqx.Module):
    blocks: list
    pool: eqx.nn.AdaptiveAvgPool2d
    head: eqx.nn.Linear

    def __init__(self, mode, key):
        keys = jax.random.split(key, 3)
        self.blocks = [Block(3, 4, mode, keys[0]), Block(4, 6, mode, keys[1])]
        self.pool = eqx.nn.AdaptiveAvgPool2d(1)
        self.head = eqx.nn.Linear(6, 2, key=keys[2])

    def __call__(self, x, state):
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(self.pool(x).reshape(-1)), state


def batched(model):
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def loaded(source, weights):
    space = {}
    exec(source.code, space)
    net = space[source.name]()
    return space["load_weights"](net, {name: np.array(x) for name, x in weights.items()})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "layer"), [("batch", "DebiasedBatchNorm"), ("ema", "AveragedBatchNorm")]
)
def test_a_pair_with_its_state_keeps_it_in_layers(mode, layer):
    model, state = eqx.nn.make_with_state(Net)(mode, jax.random.key(0))
    x = normal(1, 4, 3, 6, 8)
    _, state = batched(model)(x, state)  # statistics of nothing have a variance of 0 in `ema`
    source, proof, reason = translate_proved((batched(model), state), "torch", (x,))
    assert proof, proof
    assert not reason
    assert set(source.modes) == {"train", "eval"}

    net = loaded(source, fmapper.state((batched(model), state), source=True)).train()
    for seed in range(3):
        other = normal(seed + 2, 3 + seed, 3, 6 + 2 * seed, 4)
        want, state = batched(model)(other, state)
        got = net(torch.from_numpy(np.array(other)))
        np.testing.assert_allclose(got.detach(), want, rtol=1e-4, atol=1e-5)
        got.sum().backward()
    inference = batched(eqx.nn.inference_mode(model))
    again = loaded(source, fmapper.state((inference, state), source=True))
    for one in (net.eval(), again.eval()):
        want, _ = inference(x, state)
        got = one(torch.from_numpy(np.array(x)))
        np.testing.assert_allclose(got.detach(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_pair_is_converted_with_its_state():
    model, state = eqx.nn.make_with_state(Net)("batch", jax.random.key(0))
    x = normal(1, 4, 3, 6, 6)
    converted = fmapper.convert((batched(model), state), "torch", (x,)).train()
    for _ in range(2):
        want, state = batched(model)(x, state)
        got = converted(torch.from_numpy(np.array(x)))
        np.testing.assert_allclose(got.detach(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_the_state_is_filled_by_the_names_in_the_model():
    model, state = eqx.nn.make_with_state(Net)("batch", jax.random.key(0))
    pair = batched(model), state
    held = fmapper.state(pair, source=True)
    assert "blocks.1.norm.batch_state_index.0" in held
    held["blocks.1.norm.batch_state_index.0"] = jnp.full(6, 3.0)
    _, new = fmapper.load_state(pair, held, source=True)
    index = model.blocks[1].norm.batch_state_index
    np.testing.assert_array_equal(new.get(index)[0], np.full(6, 3.0))
    assert not np.any(state.get(index)[0])


@pytest.mark.nightly
def test_a_counter_that_is_a_state_is_a_buffer():
    class Counter(eqx.Module):
        index: eqx.nn.StateIndex
        linear: eqx.nn.Linear

        def __init__(self, key):
            self.index = eqx.nn.StateIndex(jnp.zeros(3))
            self.linear = eqx.nn.Linear(3, 2, key=key)

        def __call__(self, state, x, scale=1.0):
            mean = 0.9 * state.get(self.index) + 0.1 * x
            return self.linear(x - mean) * scale, state.set(self.index, mean)

    model, state = eqx.nn.make_with_state(Counter)(jax.random.key(0))
    source, proof, reason = translate_proved((model, state), "torch", (jnp.arange(3.0),))
    assert proof, (proof, reason)
    net = loaded(source, fmapper.state((model, state), source=True))
    for at in range(3):
        want, state = model(state, jnp.arange(3.0) + at)
        np.testing.assert_allclose(net(torch.arange(3.0) + at).detach(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_an_axis_that_nobody_names_is_explained():
    model, state = eqx.nn.make_with_state(Net)("batch", jax.random.key(0))
    with pytest.raises(fmapper.ConversionError, match=r"pass jax.vmap\(model, axis_name="):
        fmapper.source((model, state), "torch", (normal(1, 3, 6, 6),), train=True)


def test_statements_lose_the_state_that_they_assign():
    assert states.statement_without("h, bn_state = f(x, bn_state)") == "h = f(x, bn_state)"
    assert states.statement_without("a, b, s = f(x)") == "a, b = f(x)"
    assert states.statement_without("return f(x)") == "return f(x)"


@pytest.mark.nightly
def test_buffers_in_a_list_stay_buffers():
    nnx = pytest.importorskip("flax.nnx")

    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.scales = nnx.List([nnx.Variable(jnp.full(4, i + 2.0)) for i in range(2)])
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            for scale in self.scales:
                x = jnp.tanh(self.linear(x) * scale[...])
            return x

    source, proof, _ = translate_proved(Scaled(nnx.Rngs(0)), "torch", (normal(1, 3, 4),))
    assert proof, proof
    space = {}
    exec(source.code, space)
    net = space["Scaled"]()
    assert {name for name, _ in net.named_buffers()} == {"scales.0", "scales.1"}
