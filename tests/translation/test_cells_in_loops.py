"""Cells that loops of JAX call, in files for torch: each is a class with a `forward`."""

from __future__ import annotations

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")
jnp = jax.numpy

from support.written import initialised, normal, run, written  # noqa: E402

pytestmark = pytest.mark.nightly


def agree(model, *args, others=()):
    """Asserts that a file gives what its model does, on other sizes, too; returns the file."""
    source, net, _ = written(model, *args)
    for given in (args, *others):
        tensors = [torch.from_numpy(np.array(x)) for x in given]
        got, want = jax.tree.leaves(net(*tensors)), jax.tree.leaves(run(model, *given))
        assert len(got) == len(want) > 0
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-5)
    return source.code, net


class ScannedLSTM(nn.Module):
    size: int

    @functools.partial(
        nn.scan, variable_broadcast="params", in_axes=1, out_axes=1, split_rngs={"params": False}
    )
    @nn.compact
    def __call__(self, carry, x):
        return nn.OptimizedLSTMCell(self.size)(carry, x)


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, x):
        zeros = jnp.zeros((x.shape[0], 6))
        carry, y = ScannedLSTM(6, name="lstm")((zeros, zeros), x)
        return nn.Dense(3)(y), carry


def test_a_cell_that_joins_its_kernels_has_a_layer_for_each_gate():
    model, x = Tagger(), normal(2, 5, 4)
    _code, net = agree(initialised(model, x), x, others=[(normal(3, 7, 4),)])
    cell = net.lstm.OptimizedLSTMCell_0
    (c, h), y = cell((torch.zeros(2, 6), torch.zeros(2, 6)), torch.ones(2, 4))
    assert y is h
    assert c.shape == (2, 6)


def test_both_directions_and_the_states_that_nobody_uses():
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            forward = nnx.RNN(nnx.LSTMCell(4, 5, rngs=rngs))
            self.rnn = nnx.Bidirectional(forward, nnx.RNN(nnx.GRUCell(4, 5, rngs=rngs)))

        def __call__(self, x):
            return self.rnn(x)

    model, x = Net(), normal(2, 4, 4)
    _code, net = agree(model, x, others=[(normal(3, 6, 4),)])
    (c, h), y = net.rnn.forward_rnn(torch.from_numpy(np.array(x)))
    (want_c, want_h), want_y = model.rnn.forward_rnn(x, return_carry=True)
    for ours, theirs in ((c, want_c), (h, want_h), (y, want_y)):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-5)
