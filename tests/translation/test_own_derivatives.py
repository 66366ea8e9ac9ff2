"""Functions of JAX with a derivative of their own in files for torch: each a `Function` there."""

from __future__ import annotations

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

from support.written import written_code  # noqa: E402


def close(ours, theirs):
    scale = max(float(jnp.abs(theirs).max()), 1.0)
    np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-5 * scale)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, g: (g,))


@jax.custom_vjp
def binarize(x):
    return jnp.where(x >= 0, 1.0, -1.0)


binarize.defvjp(lambda x: (binarize(x), x), lambda x, g: (g * (jnp.abs(x) <= 1),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reverse_gradient(x, scale):
    return x


reverse_gradient.defvjp(lambda x, _: (x, None), lambda scale, _, g: (-scale * g,))


@jax.custom_vjp
def clip_gradient(low, high, x):
    return x


clip_gradient.defvjp(
    lambda low, high, x: (x, (low, high)),
    lambda held, g: (None, None, jnp.clip(g, *held)),
)


def test_a_rule_that_does_not_call_the_function_is_differentiable_once():
    @jax.custom_vjp
    def half(x):
        return x * 1.0

    half.defvjp(lambda x: (x * 1.0, None), lambda _, gradient: (gradient / 2,))
    _, net = written_code(lambda x: (half(x) ** 2).sum(), normal(4))
    x = torch.ones(4, requires_grad=True)
    np.testing.assert_array_equal(torch.autograd.grad(net(x), x)[0], 1.0)
    with pytest.raises(NotImplementedError, match="half has no second"):
        torch.autograd.grad(net(x), x, create_graph=True)


@pytest.mark.nightly
def test_a_size_that_varies_is_that_of_an_argument():
    @jax.custom_vjp
    def mean(x):
        return jnp.sum(x) / x.shape[0]

    mean.defvjp(lambda x: (mean(x), x), lambda x, g: (jnp.full(x.shape, g / (2 * x.shape[0])),))
    function = lambda x: mean(jnp.sin(x)) * x  # noqa: E731
    x = normal(6)
    _, net = written_code(function, x, shapes="auto")
    longer = normal(9, seed=1)
    ours = torch.from_numpy(np.array(longer)).requires_grad_()
    got = net(ours)
    close(got, function(longer))
    got.sum().backward()
    close(ours.grad, jax.grad(lambda x: function(x).sum())(longer))


@pytest.mark.nightly
def test_a_system_that_has_no_solution_is_nan_and_not_an_error():
    _, net = written_code(jnp.linalg.solve, jnp.eye(3), jnp.ones(3))
    got = net(torch.zeros(3, 3), torch.ones(3))
    assert not torch.isfinite(got).any()


@pytest.mark.nightly
def test_what_a_model_of_parts_calls_is_one_function():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return straight_through(self.linear(x) * 3.0)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = Layer(rngs), Layer(rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    _code, net = written_code(Net(nnx.Rngs(0)), normal(5, 4))
    x = torch.from_numpy(np.array(normal(5, 4))).requires_grad_()
    net(x).sum().backward()
    assert x.grad.abs().sum() > 0
