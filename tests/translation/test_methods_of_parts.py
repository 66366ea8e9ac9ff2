"""Parts of JAX models that have no `__call__`: what is called of them are methods of torch, too."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

from support.written import normal, written  # noqa: E402

pytestmark = pytest.mark.nightly


class Shift(nnx.Module):
    def __init__(self, seed):
        self.by = nnx.Param(normal(4, seed=seed))

    def encode(self, x):
        return jnp.tanh(x + self.by[...]), jnp.sum(self.by[...])

    def decode(self, y):
        return jnp.arctanh(y) - self.by[...]


class Flow(nnx.Module):
    def __init__(self):
        self.steps = nnx.List([Shift(seed) for seed in range(2)])

    def __call__(self, x):
        total = 0.0
        for step in self.steps:
            x, size = step.encode(x)
            total = total + size
        for step in reversed(self.steps):
            x = step.decode(x)
        return x, total


class Policy(eqx.Module):
    linear: eqx.nn.Linear

    def act(self, x):
        return jnp.tanh(self.linear(x))


class Agent(eqx.Module):
    policy: Policy

    def __call__(self, x):
        return jax.vmap(self.policy.act)(x)


def agree(net, model, x):
    found = jax.tree.leaves(net(torch.tensor(np.array(x))))
    for ours, theirs in zip(found, jax.tree.leaves(model(x)), strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-4, atol=1e-5)


def test_methods_of_parts_without_a_call():
    model = Flow()
    source, net, _ = written(model, normal(3, 4))
    assert "class Shift(nn.Module):" in source.code
    assert "def encode(self, x):" in source.code
    assert "def decode(self, y):" in source.code
    assert ".encode(" in source.code.partition("class Flow")[2]
    agree(net, model, normal(5, 4, seed=3))


def test_methods_of_parts_without_a_call_below_vmap():
    model = Agent(Policy(eqx.nn.Linear(4, 2, key=jax.random.key(0))))
    source, net, _ = written(model, normal(3, 4))
    assert "return self.policy.act(x)" in source.code
    agree(net, model, normal(5, 4, seed=3))
