"""What files for torch call by the names that torch has: with the same slopes at bends."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy

from support.written import normal, written_code  # noqa: E402

_BENDS = [-np.inf, -30.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0, 6.0, 30.0, np.inf]


def code_and_results(function, x):
    """Returns a file's code after comparing its outputs and gradients with those of JAX."""
    code, net = written_code(function, x)
    given = torch.tensor(np.asarray(x), requires_grad=True)
    found = net(given)
    wanted = function(x)
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)
    waves = np.cos(np.arange(wanted.size, dtype=np.float32)).reshape(wanted.shape)
    slope = jax.grad(lambda x: jnp.sum(jnp.real(function(x)) * waves))(x)
    (torch.real(found) * torch.tensor(waves)).sum().backward()
    np.testing.assert_allclose(given.grad.numpy(), slope, rtol=1e-4, atol=1e-5)
    return code


@pytest.mark.parametrize("function", [jax.nn.elu, jax.nn.selu, jax.nn.relu6])
def test_activations_take_infinities_and_nan(function):
    _, net = written_code(function, jnp.zeros(len(_BENDS) + 1))
    x = jnp.array([*_BENDS, np.nan], jnp.float32)
    np.testing.assert_allclose(net(torch.tensor(np.asarray(x))).numpy(), function(x), rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.nn.logsumexp(x, 1),
        lambda x: jax.nn.logsumexp(x, None),
        lambda x: jax.scipy.special.logsumexp(x, (0, 2), keepdims=True),
        lambda x: jnp.var(x, 1),
        lambda x: jnp.var(x, (0, 2), keepdims=True),
        lambda x: jnp.std(x, 1),
    ],
)
def test_reductions_have_the_values_and_slopes_of_jax(function):
    code_and_results(function, normal(3, 4, 5) * 10)


@pytest.mark.nightly
def test_sums_of_exponentials_take_infinities():
    rows = [[0.0, np.inf, 1.0], [-np.inf, 2.0, 3.0], [-np.inf] * 3, [np.nan, 0.0, 1.0]]
    x = jnp.array(rows, jnp.float32)
    _code, net = written_code(lambda x: jax.nn.logsumexp(x, 1), x)
    wanted = np.asarray(jax.nn.logsumexp(x, 1))
    np.testing.assert_allclose(net(torch.tensor(np.asarray(x))).numpy(), wanted, rtol=1e-6)


@pytest.mark.nightly
def test_a_variance_of_sizes_that_vary_asks_for_none():
    _code, net = written_code(lambda x: jnp.var(x, 0), normal(3, 4), shapes="auto")
    x = normal(7, 4)
    np.testing.assert_allclose(net(torch.tensor(np.asarray(x))).numpy(), jnp.var(x, 0), rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("function", "other"),
    [
        (lambda x: jnp.where(x > 0, x, jnp.expm1(jnp.where(x >= 0, 0.0, x))), "F.elu"),
        (jax.nn.hard_tanh, "torch.clamp"),  # whose slope at bounds is 0 since torch 2.14
        (lambda x: jnp.log(jnp.sum(jnp.exp(x - 1.0))) + 1.0, "logsumexp"),
        (lambda x: jnp.mean(jnp.square(x - jnp.mean(x) * 2.0)), "torch.var"),
    ],
)
def test_what_is_nearly_a_function_stays(function, other):
    assert other not in code_and_results(function, normal(6))
