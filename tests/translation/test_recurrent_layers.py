"""Loops over the steps of cells of JAX as the recurrent layers of torch that compute the same."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import fmapper

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")
jnp = jax.numpy

from fmapper.translation.source import translate_proved  # noqa: E402
from support.written import initialised, normal  # noqa: E402

pytestmark = pytest.mark.nightly


class Tagger(nnx.Module):
    def __init__(self, cell, other=None):
        rngs = nnx.Rngs(0)
        forward, backward = (nnx.RNN(one(4, 4, rngs=rngs)) for one in (cell, other or cell))
        self.rnn = nnx.Bidirectional(forward, backward)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.rnn(x)
        return self.head(x)


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.GRUCell(5))(x)
        x = nn.RNN(nn.LSTMCell(4))(x)
        x = nn.RNN(nn.SimpleCell(6))(x)
        return nn.Dense(2)(x[:, -1])


def test_cells_of_linen_are_layers_of_the_model_and_equal_in_gradients_and_steps():
    x = normal(3, 6, 4)
    _found, proof, reason = translate_proved(initialised(Stack(), x), "torch", (x,))
    assert proof
    assert not reason


def test_the_arrays_of_gates_learn():
    model, x = Tagger(nnx.LSTMCell), normal(2, 5, 4)
    net = fmapper.convert(model, "torch", (x,), structure=True)
    given, before = torch.from_numpy(np.array(x)), copy.deepcopy(net)
    torch.sin(net(given)).sum().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.sub_(0.1 * parameter.grad)
    learned = fmapper.state(net, source=True)
    assert {*learned} == {*fmapper.state(model)}
    grads = nnx.grad(lambda m: jnp.sin(m(x)).sum())(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    for name, array in fmapper.state(model).items():
        if not jnp.issubdtype(array.dtype, jnp.floating):  # the state of generators
            continue
        np.testing.assert_allclose(learned[name].detach(), array, rtol=1e-4, atol=1e-5)
    loaded = fmapper.load_state(before, learned, source=True)
    np.testing.assert_allclose(loaded(given).detach(), model(x), rtol=1e-4, atol=1e-5)
