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
from support.written import initialised, normal, run, written  # noqa: E402

pytestmark = pytest.mark.nightly


def agree(model, *args, others=()):
    """Asserts that a file gives what its model does, on other sizes, too."""
    source, net, program = written(model, *args)
    for given in (args, *others):
        for one in (net, copy.deepcopy(net)):
            got = one(*[torch.from_numpy(np.array(x)) for x in given])
            np.testing.assert_allclose(got.detach(), run(model, *given), rtol=1e-5, atol=1e-5)
    count = sum(x.size for x in jax.tree.leaves(program.parameters))
    assert sum(p.numel() for p in net.parameters()) == count  # no bias is there twice
    return source.code, net


class Tagger(nnx.Module):
    def __init__(self, cell, other=None):
        rngs = nnx.Rngs(0)
        forward, backward = (nnx.RNN(one(4, 4, rngs=rngs)) for one in (cell, other or cell))
        self.rnn = nnx.Bidirectional(forward, backward)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.rnn(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("LSTMCell", "SingleBiasLSTM"),
        ("OptimizedLSTMCell", "SingleBiasLSTM"),
        ("GRUCell", "SingleBiasGRU"),
        ("SimpleCell", "SingleBiasRNN"),
    ],
)
def test_two_directions_are_one_layer(cell, kind):
    _code, net = agree(Tagger(getattr(nnx, cell)), normal(2, 5, 4), others=[(normal(3, 7, 4),)])
    assert isinstance(net.rnn, torch.nn.RNNBase)


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.GRUCell(5))(x)
        x = nn.RNN(nn.LSTMCell(4))(x)
        x = nn.RNN(nn.SimpleCell(6))(x)
        return nn.Dense(2)(x[:, -1])


def test_cells_of_linen_are_layers_of_the_model_and_equal_in_gradients_and_steps():
    x = normal(3, 6, 4)
    found, proof, reason = translate_proved(initialised(Stack(), x), "torch", (x,))
    assert proof
    assert not reason
    assert found.layers[0] == found.layers[1]


def test_the_arrays_of_gates_have_their_names_in_the_source_and_learn():
    model, x = Tagger(nnx.LSTMCell), normal(2, 5, 4)
    net = fmapper.convert(model, "torch", (x,), structure=True)
    assert fmapper.state(net)["rnn.weight_hh_l0_reverse"].shape == (16, 4)
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
