"""Orthogonal polynomials of whole degrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.pointwise.special import binary

Function = Callable[..., Any]


def _recurrence(x: Any, n: Any, first: Any, step: Function) -> jax.Array:
    """Returns the nth of polynomials p(0) = 1, p(1) = first, p(k + 1) = step(k, p(k), p(k - 1))."""
    n = jnp.trunc(n)
    last = jnp.max(jnp.where(jnp.isfinite(n), n, 0), initial=1)

    def further(state: Any) -> Any:
        k, before, now = state
        new = jnp.where(k < n, step(k, now, before), now)
        return k + 1, jnp.where(k < n, now, before), new

    start = (jnp.ones((), x.dtype), jnp.ones_like(x), jnp.broadcast_to(first, x.shape))
    _, _, value = jax.lax.while_loop(lambda state: state[0] < last, further, start)
    return jnp.where(n < 0, 0, jnp.where(n == 0, 1, value))


def _even(n: Any) -> Any:
    return jnp.trunc(n) % 2 == 0


def _chebyshev(x: Any, n: Any, first: Any, plus: Any, minus: Any, wave: Any, above: int) -> Any:
    """Computes by recurrence, with exact values at 1 and -1 and by cosines at high degrees."""
    n = jnp.trunc(n)
    value = _recurrence(x, n, first, lambda k, now, before: 2 * x * now - before)
    value = jnp.where((n > above) & (jnp.abs(x) < 1), wave, value)
    value = jnp.where(x == 1, plus, jnp.where(x == -1, minus, value))
    return jnp.where(n < 0, 0, value)


def _t(x: Any, n: Any) -> jax.Array:
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    return _chebyshev(x, n, x, 1, jnp.where(_even(n), 1, -1), jnp.cos(n * angle), 6)


def _u(x: Any, n: Any) -> jax.Array:
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    wave = jnp.sin((n + 1) * angle) / jnp.sin(angle)
    ends = n + 1
    return _chebyshev(x, n, 2 * x, ends, jnp.where(_even(n), ends, -ends), wave, 8)


def _v(x: Any, n: Any) -> jax.Array:
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    wave = jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2)
    ends = 2 * n + 1
    return _chebyshev(x, n, 2 * x - 1, 1, jnp.where(_even(n), ends, -ends), wave, 8)


def _w(x: Any, n: Any) -> jax.Array:
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    wave = jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)
    return _chebyshev(x, n, 2 * x + 1, 2 * n + 1, jnp.where(_even(n), 1, -1), wave, 8)


for _kind, _function in (("t", _t), ("u", _u), ("v", _v), ("w", _w)):
    binary(f"aten::special_chebyshev_polynomial_{_kind}")(_function)
    binary(f"aten::special_shifted_chebyshev_polynomial_{_kind}")(
        lambda x, n, function=_function: function(2 * x - 1, n)
    )


def _hermite_limit(x: Any, n: Any, value: Any) -> jax.Array:
    """Puts NaN above the degree where torch gives up."""
    return jnp.where(n > (128 if x.dtype == np.float32 else 512), jnp.nan, value)


@binary("aten::special_hermite_polynomial_h")
def hermite_h(x: Any, n: Any) -> jax.Array:
    """Returns the physicists' Hermite polynomial of degree n."""
    value = _recurrence(x, n, 2 * x, lambda k, now, before: 2 * x * now - 2 * k * before)
    return _hermite_limit(x, n, value)


@binary("aten::special_hermite_polynomial_he")
def hermite_he(x: Any, n: Any) -> jax.Array:
    """Returns the probabilists' Hermite polynomial of degree n."""
    value = _recurrence(x, n, x, lambda k, now, before: x * now - k * before)
    return _hermite_limit(x, n, value)


@binary("aten::special_laguerre_polynomial_l")
def laguerre_l(x: Any, n: Any) -> jax.Array:
    """Returns the Laguerre polynomial of degree n."""

    def step(k: Any, now: Any, before: Any) -> Any:
        return ((2 * k + 1 - x) * now - k * before) / (k + 1)

    return _recurrence(x, n, 1 - x, step)


@binary("aten::special_legendre_polynomial_p")
def legendre_p(x: Any, n: Any) -> jax.Array:
    """Returns the Legendre polynomial of degree n."""

    def step(k: Any, now: Any, before: Any) -> Any:
        return ((2 * k + 1) * x * now - k * before) / (k + 1)

    return _recurrence(x, n, x, step)
