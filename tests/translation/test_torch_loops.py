"""Loops and branches of JAX in files for torch."""

from __future__ import annotations

import numpy as np
import pytest

import fmapper

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
jnp, lax = jax.numpy, jax.lax

from fmapper.translation.source import translate  # noqa: E402
from support.written import written_code  # noqa: E402


def agree(function, net, *args):
    """Asserts that outputs and derivatives are JAX's."""
    given = [torch.from_numpy(np.array(x)) for x in args]
    floats = [x for x in given if x.is_floating_point()]
    for x in floats:
        x.requires_grad_()
    want = jax.tree.leaves(function(*args))
    got = jax.tree.leaves(net(*given))
    assert len(got) == len(want) > 0
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-6)
    return given, got


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def backwards(xs, w):
    def step(h, x):
        h = jnp.sin(h + x @ w)
        return h, (h, h * x)

    return lax.scan(step, xs[0] * 2, xs, reverse=True)


@pytest.mark.nightly
def test_a_loop_over_rows_whose_number_varies():
    args = normal(0, 5, 3), normal(1, 3, 3)
    _, net = written_code(backwards, *args, shapes="auto")
    agree(backwards, net, normal(2, 9, 3), args[1])


def halved(x, y):
    """Ends by what it computes; the condition takes one expression."""
    return lax.while_loop(lambda c: c[0].sum() > 1e-3, lambda c: (c[0] / 2, c[1] + c[0]), (x, y))


def counted(x, y):
    """The condition takes statements of its own."""

    def holds(carry):
        i, x = carry
        s = jnp.abs(x).sum()
        return (s * s + s > 1e-3) & (i < 20)

    return lax.while_loop(holds, lambda c: (c[0] + 1, c[1] / y), (0, x))


@pytest.mark.parametrize("function", [halved, counted])
def test_loops_with_a_condition(function):
    args = jnp.abs(normal(0, 4)), jnp.full(4, 3.0)
    code, net = written_code(function, *args)
    assert "while " in code
    agree(function, net, *args)
    agree(function, net, args[0] * 100, args[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [-4, 0, 1, 2, 7])
def test_several_branches(number):
    def function(i, x):
        branches = [lambda x: x + 1, lambda x: jnp.cos(x) * x, lambda x: x @ x.T, lambda x: -x]
        return lax.switch(i, branches, x)

    code, net = written_code(function, jnp.int32(1), normal(0, 3, 3))
    assert "elif " in code
    agree(function, net, jnp.int32(number), normal(1, 3, 3))


def test_a_loop_for_each_element_alone_is_refused_by_name():
    def function(x):
        return jax.vmap(lambda x: lax.while_loop(lambda y: y > 1, lambda y: y / 2, x))(x)

    with pytest.raises(fmapper.ConversionError, match="separately for each element"):
        written_code(function, jnp.arange(4.0))


class Tagger(nnx.Module):
    """Its cell draws the key for a first carry that it then fills with zeros."""

    def __init__(self, rngs):
        self.recurrent = nnx.RNN(nnx.GRUCell(4, 6, rngs=rngs))
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.recurrent(x))


@pytest.mark.nightly
def test_a_recurrent_network_is_a_layer():
    model = Tagger(nnx.Rngs(0))
    _source, _program, proof = translate(model, "torch", (normal(0, 2, 5, 4),), {}, proved=True)
    assert proof, str(proof)
    fmapper.convert(model, "torch", (normal(0, 2, 5, 4),), structure=True)
