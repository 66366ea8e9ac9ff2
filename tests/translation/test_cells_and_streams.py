"""Cells and states of Equinox, and streams of random numbers of NNX, in files for torch."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import fmapper

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

from support.written import normal, written  # noqa: E402

pytestmark = pytest.mark.nightly


class Tagger(eqx.Module):
    cells: list
    summary: eqx.nn.LSTMCell

    def __init__(self, key):
        *keys, last = jax.random.split(key, 3)
        self.cells = [eqx.nn.GRUCell(4, 4, key=one) for one in keys]
        self.summary = eqx.nn.LSTMCell(4, 4, key=last)

    def __call__(self, h):
        for cell in self.cells:

            def step(carry, x, cell=cell):
                carry = cell(x, carry)
                return carry, carry

            _, h = jax.lax.scan(step, jnp.zeros(4), h)
        zeros = jnp.zeros(4), jnp.zeros(4)
        (last, _), _ = jax.lax.scan(lambda state, x: (self.summary(x, state), None), zeros, h)
        return h, last


def test_stacked_cells_that_begin_with_the_same_zeros_are_layers():
    model = jax.vmap(Tagger(jax.random.key(0)))
    _source, net, _ = written(model, normal(3, 7, 4))
    for x in (normal(3, 7, 4), normal(2, 5, 4, seed=1)):
        ours = net(torch.from_numpy(np.array(x)))
        for got, want in zip(ours, model(x), strict=True):
            np.testing.assert_allclose(got.detach(), want, rtol=1e-4, atol=1e-5)


class Sampler(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, noise=1)
        self.first, self.second = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 4, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x):
        x = self.first(x)
        x = x + jax.random.normal(self.rngs.noise(), x.shape)
        return self.second(x)


class Samples(nnx.Module):
    def __init__(self):
        self.sampler = Sampler()
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.head(self.sampler(x))


def test_a_stream_counts_where_it_draws_though_another_part_is_called_after_it():
    model, x = Samples(), normal(5, 4)
    _source, net, _ = written(model, x)
    given = torch.from_numpy(np.array(x))
    for _ in range(2):  # with other numbers each time, those of the source
        np.testing.assert_allclose(net(given).detach(), model(x), rtol=1e-4, atol=1e-5)
    assert int(net.sampler.rngs.noise.count) == 2


class Normalised(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return jax.nn.relu(x), state


class Stack(eqx.Module):
    parts: list

    def __call__(self, x, state):
        for part in self.parts:
            x, state = part(x, state)
        return x, state


def test_parts_with_a_state_of_their_own_are_one_class():
    norm = functools.partial(eqx.nn.BatchNorm, 4, axis_name="batch", mode="batch")
    stack, state = eqx.nn.make_with_state(lambda: Stack([Normalised(norm()) for _ in range(2)]))()

    def model(x, state):
        return jax.vmap(stack, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    x = normal(6, 4)
    with pytest.warns(fmapper.ConversionWarning, match="of their own, state_field0, "):
        _source, net, _ = written(model, x, state, shapes=None)
    leaves = [torch.from_numpy(np.array(leaf)) for leaf in (x, *jax.tree.leaves(state))]
    ours, theirs = jax.tree.leaves(tuple(net(*leaves))), jax.tree.leaves(model(x, state))
    assert len(ours) == len(theirs)
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got.detach(), want, rtol=1e-4, atol=1e-5)
