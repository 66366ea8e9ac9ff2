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
eqx = pytest.importorskip("equinox")
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
    code, net = agree(Tagger(getattr(nnx, cell)), normal(2, 5, 4), others=[(normal(3, 7, 4),)])
    assert f"self.rnn = {kind}(4, 4, batch_first=True, bidirectional=True)" in code
    assert "x, _ = self.rnn(x)" in code
    assert "for " not in code.partition("class Tagger")[2].partition("ARRAYS")[0]
    assert isinstance(net.rnn, torch.nn.RNNBase)


def test_directions_of_two_kinds_are_classes():
    code, _ = agree(Tagger(nnx.LSTMCell, nnx.GRUCell), normal(2, 5, 4))
    assert "class Bidirectional(nn.Module)" in code


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
    assert "self.GRUCell_0 = NewBiasGRU(4, 5, batch_first=True)" in found.code
    assert "x, _ = self.LSTMCell_0(x)" in found.code
    assert found.layers[0] == found.layers[1]


def test_both_directions_of_a_gru_with_a_bias_of_its_new_state():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Bidirectional(nn.RNN(nn.GRUCell(5)), nn.RNN(nn.GRUCell(5)))(x)

    x = normal(2, 4, 3)
    code, _ = agree(initialised(Net(), x), x, others=[(normal(3, 6, 3),)])
    assert code.count("NewBiasGRU(3, 5, batch_first=True)") == 2


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3)])
def test_a_sequence_without_a_batch_or_with_the_time_first(shape):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.RNN(nn.GRUCell(4), time_major=True)(x)

    x = normal(*shape)
    code, _ = agree(initialised(Net(), x), x)
    assert "self.GRUCell_0 = NewBiasGRU(3, 4)" in code


class LastState(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self):
        self.cell = eqx.nn.GRUCell(3, 4, key=jax.random.key(0))
        self.head = eqx.nn.Linear(4, 2, key=jax.random.key(1))

    def __call__(self, xs):
        out, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(4), xs)
        return self.head(out)


def test_a_last_state_is_the_last_output():
    code, _ = agree(jax.vmap(LastState()), normal(2, 5, 3), others=[(normal(3, 7, 3),)])
    assert "self.cell = NewBiasGRU(3, 4, batch_first=True)" in code
    assert "[:, -1]" in code


class OtherCell(nnx.Module):
    """A GRU whose gate keeps the state where those of torch renew it."""

    def __init__(self, rngs):
        self.r, self.z, self.n = (nnx.Linear(4, 4, rngs=rngs) for _ in range(3))
        self.hr, self.hz, self.hn = (nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(3))

    def __call__(self, h, x):
        r = nnx.sigmoid(self.r(x) + self.hr(h))
        z = nnx.sigmoid(self.z(x) + self.hz(h))
        n = jnp.tanh(self.n(x) + r * self.hn(h))
        h = z * n + (1 - z) * h
        return h, h


class Other(nnx.Module):
    def __init__(self):
        self.cell = OtherCell(nnx.Rngs(0))

    def __call__(self, x):
        _, ys = nnx.scan(
            lambda cell, h, x: cell(h, x), in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1)
        )(self.cell, jnp.zeros((x.shape[0], 4)), x)
        return ys


def test_other_equations_stay_a_class():
    code, _ = agree(Other(), normal(2, 5, 4))
    assert "class OtherCell(nn.Module)" in code
    assert "nn.GRU" not in code


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
