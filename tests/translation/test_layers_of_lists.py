"""Layers in lists of Flax models: their weights by name, and what they draw when called again."""

import jax
import numpy as np
import pytest
import torch

import fmapper
from fmapper.translation.source import translate_proved

pytestmark = pytest.mark.nightly

linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")


class Stacked(linen.Module):
    def setup(self):
        self.rnns = [linen.RNN(linen.OptimizedLSTMCell(4)) for _ in range(2)]

    def __call__(self, x):
        for rnn in self.rnns:
            x = x + rnn(x)
        return x


def test_gates_of_layers_in_a_list_are_loaded():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    model = Stacked(), Stacked().init(jax.random.key(1), x)
    _, proof, _ = translate_proved(model, "torch", (x,))
    assert proof, proof
    there = fmapper.convert(model, "torch", (x,), structure=True)
    torch.testing.assert_close(
        there(fmapper.to_torch(x)), fmapper.to_torch(model[0].apply(model[1], x))
    )


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Linear(4, 4, rngs=rngs)
        self.other = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = x + self.drop(self.one(x))
        return x + self.drop(self.other(x))


class Lists(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Twice(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_dropout_that_is_called_twice_is_a_layer():
    x = np.ones((2, 4), np.float32)
    _source, proof, reason = translate_proved(Lists(nnx.Rngs(0)), "torch", (x,))
    assert proof, proof
    assert not reason


class Codebook(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        init = linen.initializers.normal(1.0)
        codes = self.variable("codes", "now", lambda: init(self.make_rng("params"), (4, 3)))
        total = self.variable("codes", "total", lambda: codes.value)
        if train:
            total.value = 0.9 * total.value + 0.1 * x.mean()
            codes.value = total.value * 2.0
        return linen.Dense(4)(x) @ codes.value


def test_variables_that_begin_as_one_array_are_two():
    x = jax.random.normal(jax.random.key(0), (2, 3))
    model = Codebook()
    variables = model.init(jax.random.key(1), x)
    assert variables["codes"]["now"] is variables["codes"]["total"]
    there = fmapper.convert((model, variables), "torch", (x,)).train()
    want, after = model.apply(variables, x, train=True, mutable=["codes"])
    torch.testing.assert_close(there(fmapper.to_torch(x)), fmapper.to_torch(want))
    want = model.apply({**variables, **after}, x)
    torch.testing.assert_close(there.eval()(fmapper.to_torch(x)), fmapper.to_torch(want))
    _source, proof, _ = translate_proved((model, variables), "torch", (x,))
    assert proof, proof


class Target(nnx.Module):
    def __init__(self, rngs):
        self.online = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.target = nnx.Variable(self.online.kernel[...])

    def __call__(self, x):
        return self.online(x) - jax.lax.stop_gradient(x @ self.target[...])


def test_a_variable_that_begins_with_the_array_of_a_parameter_is_not_tied_to_it():
    model, x = Target(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 3))
    _source, proof, _ = translate_proved(model, "torch", (x,))
    assert proof, proof
    assert model.online.kernel.get_value() is model.target.get_value()
    there = fmapper.convert(model, "torch", (x,))
    assert {"online.kernel", "target"} <= there.state_dict().keys()
    with torch.no_grad():
        there.get_parameter("online.kernel").mul_(2.0)
    model.online.kernel.set_value(2.0 * model.online.kernel.get_value())
    torch.testing.assert_close(there(fmapper.to_torch(x)), fmapper.to_torch(model(x)))
