"""Special functions: gamma functions, logarithms, the Hurwitz zeta function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special as jsp

from fmapper_adapters.jax.aten.pointwise.arithmetic import in_opmath
from fmapper_adapters.jax.aten.pointwise.comparisons import is_nan
from fmapper_adapters.jax.aten.table import lowering, pointwise
from fmapper_adapters.jax.aten.types import promote, wide

Function = Callable[..., Any]


def unary(*ops: str) -> Callable[[Function], Function]:
    """Registers a function of floats; halves are computed in float32, integers become floats."""

    def add(function: Function) -> Function:
        def lower(x: Any) -> jax.Array:
            (x,) = promote(x, to_float=True)
            return function(x.astype(wide(x.dtype))).astype(x.dtype)

        lowering(*ops, dims=pointwise)(lower)
        return function

    return add


def binary(*ops: str) -> Callable[[Function], Function]:
    """Registers a function of two floats, in the same way."""

    def add(function: Function) -> Function:
        def lower(x: Any, y: Any) -> jax.Array:
            dtype, (x, y) = in_opmath(x, y, to_float=True)
            return function(*jnp.broadcast_arrays(x, y)).astype(dtype)

        lowering(*ops, dims=pointwise)(lower)
        return function

    return add


unary("aten::erf")(jax.lax.erf)
unary("aten::erfc")(jax.lax.erfc)
unary("aten::erfinv")(jax.lax.erf_inv)
unary("aten::special_i0e")(jsp.i0e)
unary("aten::special_i1", "aten::special_modified_bessel_i1")(jsp.i1)
unary("aten::special_i1e")(jsp.i1e)
unary("aten::special_ndtri")(jsp.ndtri)
unary("aten::special_log_ndtr")(jsp.log_ndtr)
unary("aten::special_entr")(jsp.entr)


@unary("aten::lgamma")
def lgamma(x: Any) -> jax.Array:
    """Computes lgamma, exactly 0 at 1 and 2, where XLA is off by rounding."""
    y = jax.lax.lgamma(x)
    return y - jax.lax.stop_gradient(jnp.where((x == 1) | (x == 2), y, 0))


@unary("aten::i0", "aten::special_modified_bessel_i0")
@jax.custom_jvp
def i0(x: Any) -> jax.Array:
    """Computes the modified Bessel function of order 0, whose slope at zero is zero."""
    return jsp.i0(x)


i0.defjvps(lambda slope, value, x: slope * jsp.i1(x))  # type: ignore[attr-defined]


@jax.custom_jvp
def _add_exponentials(x: Any, y: Any) -> jax.Array:
    """Computes `jnp.logaddexp`; slopes add up to one, even after rounding."""
    return jnp.logaddexp(x, y)


_add_exponentials.defjvps(
    lambda slope, value, x, y: slope / (1 + jnp.exp(y - x)),
    lambda slope, value, x, y: slope / (1 + jnp.exp(x - y)),
)


@binary("aten::logaddexp2")
@jax.custom_jvp
def logaddexp2(x: Any, y: Any) -> jax.Array:
    """Computes logarithms of sums of powers of two, with slopes that add up to one."""
    return jnp.logaddexp2(x, y)


logaddexp2.defjvps(  # type: ignore[attr-defined]
    lambda slope, value, x, y: slope / (1 + jnp.exp2(y - x)),
    lambda slope, value, x, y: slope / (1 + jnp.exp2(x - y)),
)


@binary("aten::logaddexp")
def logaddexp(x: Any, y: Any) -> jax.Array:
    """Computes logaddexp; complex results keep the larger term's imaginary part, even beyond pi."""
    if not jnp.iscomplexobj(x):
        return _add_exponentials(x, y)
    first = x.real >= y.real
    large, small = jnp.where(first, x, y), jnp.where(first, y, x)
    infinite = ~jnp.isfinite(large.real) & (large.real == small.real)
    negligible = jnp.where(infinite, 0, small - large)
    total = large + jnp.log1p(jnp.exp(negligible))
    # Values that are not selected must not overflow either, or the derivative is NaN.
    ends = (jnp.where(infinite, x, 0) for x in (small, large))
    both = jnp.where(large.real < 0, small, jnp.log(sum(map(jnp.exp, ends))))
    return jnp.where(infinite, both, total)


@unary("aten::digamma")
def digamma(x: Any) -> jax.Array:
    """Returns the derivative of lgamma; infinite at zero, with the other sign."""
    zero = x == 0
    return jnp.where(zero, jnp.copysign(jnp.inf, -x), jax.lax.digamma(jnp.where(zero, 1, x)))


@jax.custom_jvp
def _hurwitz(s: Any, q: Any) -> jax.Array:
    """Computes the Hurwitz zeta function, for whole s left of zero too, where JAX loses digits."""

    def below(q: Any) -> Any:
        return (q <= 0) & (q > -_FARTHEST)

    def step(state: Any) -> Any:
        q, total = state
        return jnp.where(below(q), q + 1, q), jnp.where(below(q), total + q**-s, total)

    start = (q, jnp.zeros_like(q))
    moved, first = jax.lax.while_loop(lambda state: jnp.any(below(state[0])), step, start)
    total = first + jsp.zeta(s, jnp.where(moved > 0, moved, 1))
    pole = (q <= 0) & (q == jnp.floor(q))
    total = jnp.where(pole, jnp.inf, jnp.where((q <= 0) & (s != jnp.floor(s)), jnp.nan, total))
    total = jnp.where((q <= -_FARTHEST) & ~pole, jnp.nan, total)
    total = jnp.where((q == jnp.inf) & (s == 2), 0, total)  # torch's trigamma
    return jnp.where(s == 1, jnp.inf, jnp.where((s < 1) | is_nan(q), jnp.nan, total))


_FARTHEST = 1e5  # the largest number of terms


@_hurwitz.defjvp
def _hurwitz_slope(primals: Any, tangents: Any) -> Any:
    s, q = primals
    return _hurwitz(s, q), -s * _hurwitz(s + 1, q) * tangents[1]


binary("aten::special_zeta")(_hurwitz)


@lowering("aten::polygamma", dims=pointwise)
def polygamma(n: int, x: Any) -> jax.Array:
    """Returns the nth derivative of digamma."""
    (x,) = promote(x, to_float=True)
    y = x.astype(wide(x.dtype))
    if n == 0:
        return digamma(y).astype(x.dtype)
    factor = (-1.0) ** (n + 1) * math.factorial(n)
    return (factor * _hurwitz(jnp.full_like(y, n + 1), y)).astype(x.dtype)


@binary("aten::igamma")
def igamma(a: Any, x: Any) -> jax.Array:
    """Returns the lower incomplete gamma function, over gamma."""
    return _gamma_ends(a, x, jsp.gammainc, 1.0, 0.0)


@binary("aten::igammac")
def igammac(a: Any, x: Any) -> jax.Array:
    """Returns the upper incomplete gamma function, over gamma."""
    return _gamma_ends(a, x, jsp.gammaincc, 0.0, 1.0)


def _gamma_ends(a: Any, x: Any, function: Function, for_zero_a: float, zero_x: float) -> jax.Array:
    """Sets torch's values where an argument is zero or infinite."""
    plain = (a > 0) & (x > 0) & jnp.isfinite(a) & jnp.isfinite(x)
    value = function(jnp.where(plain, a, 1), jnp.where(plain, x, 1))
    ends = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, zero_x), for_zero_a)
    ends = jnp.where(x == 0, jnp.where(a > 0, zero_x, jnp.nan), ends)
    ends = jnp.where((a < 0) | (x < 0) | is_nan(a) | is_nan(x), jnp.nan, ends)
    return jnp.where(plain, value, ends)


@lowering("aten::logit", dims=pointwise)
def logit(x: Any, eps: float | None = None) -> jax.Array:
    """Computes `log(x / (1 - x))`, where x is first clamped to [eps, 1 - eps]."""
    (x,) = promote(x, to_float=True)
    y = x.astype(wide(x.dtype))
    if eps is not None:
        y = jnp.where(y < eps, eps, jnp.where(y > 1 - eps, 1 - eps, y))
    return _logit(y).astype(x.dtype)


@jax.custom_jvp
def _logit(x: Any) -> jax.Array:
    return jnp.log(x / (1 - x))


@_logit.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    """Returns the slope, infinite at 0 and 1 and NaN outside, as in torch."""
    (x,), (slope,) = primals, tangents
    return _logit(x), slope * jnp.where((x < 0) | (x > 1), jnp.nan, 1 / (x * (1 - x)))


@binary("aten::xlogy")
def xlogy(x: Any, y: Any) -> jax.Array:
    """Computes `x * log(y)`, zero where x is; NaN where y is."""
    return _x_log(jnp.log, x, y)


@binary("aten::special_xlog1py")
def xlog1py(x: Any, y: Any) -> jax.Array:
    """Computes `x * log1p(y)`, zero where x is; NaN where y is."""
    return _x_log(jnp.log1p, x, y)


def _x_log(log: Function, x: Any, y: Any) -> jax.Array:
    kept = (x != 0) | is_nan(y)
    return jnp.where(kept, x, 0) * log(jnp.where(kept, y, 1)) + _slope(log, x, y, kept)


def _slope(log: Function, x: Any, y: Any, kept: Any) -> jax.Array:
    """Returns zero, with the gradient `log(y)` in x where x is zero, as in torch for positive y."""
    inside = ~kept & jnp.isfinite(log(jnp.where(kept, 1, y)))
    logs = log(jnp.where(inside, y, 1))
    return jnp.where(inside, (x - jax.lax.stop_gradient(x)) * jax.lax.stop_gradient(logs), 0)
