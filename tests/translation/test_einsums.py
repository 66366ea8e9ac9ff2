"""Products of arrays of more dimensions, and arrays that a part is given twice, in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

from fmapper.translation.source import translate_proved  # noqa: E402
from support.written import normal, written  # noqa: E402

pytestmark = pytest.mark.nightly


class Grouped(nnx.Module):
    """Attention of grouped queries, with scores that are bounded."""

    def __init__(self, rngs):
        self.query = nnx.LinearGeneral(12, (4, 3), rngs=rngs)
        self.key = nnx.LinearGeneral(12, (2, 3), rngs=rngs)
        self.value = nnx.LinearGeneral(12, (2, 3), rngs=rngs)

    def __call__(self, x, y):
        batch, length = x.shape[:2]
        query = self.query(x).reshape(batch, length, 2, 2, 3)
        scores = jnp.einsum("btkgh,bskh->btkgs", query, self.key(y))
        weights = jax.nn.softmax(10 * jnp.tanh(scores / 10), axis=-1)
        return jnp.einsum("btkgs,bskh->btkgh", weights, self.value(y))


def test_products_of_grouped_queries_are_einsums():
    model = Grouped(nnx.Rngs(0))
    source, proof, reason = translate_proved(
        model, "torch", (normal(2, 5, 12), normal(2, 4, 12, seed=1))
    )
    assert proof
    assert not reason
    source.code.partition("ARRAYS")[0]
    _, net, _ = written(model, normal(2, 5, 12), normal(2, 4, 12, seed=1))
    for sizes in ((3, 7, 1), (1, 1, 6)):
        x, y = normal(sizes[0], sizes[1], 12), normal(sizes[0], sizes[2], 12, seed=2)
        found = net(torch.tensor(np.array(x)), torch.tensor(np.array(y)))
        np.testing.assert_allclose(found.detach(), model(x, y), rtol=1e-5, atol=1e-6)


class Cell(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.carry = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, state, x):
        h, c = state
        c = jnp.tanh(c + self.up(x))
        return self.carry(h) * c, c


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.cell = Cell(rngs)

    def __call__(self, x):
        start = jnp.zeros_like(x)
        state = self.cell((start, start), x)
        return self.cell(state, x)


def test_a_part_checks_that_it_is_given_one_array_twice():
    model = Twice(nnx.Rngs(0))
    _, net, _ = written(model, normal(2, 4))
    x = torch.tensor(np.array(normal(2, 4)))
    wanted: Any = model(normal(2, 4))
    for ours, theirs in zip(net(x), wanted, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"state\[1\]=state\[0\]"):
        net.cell((x, 2 * x), x)
