"""Functions of single elements, complex numbers and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ConversionError
from fmapper_adapters.jax.aten.pointwise.arithmetic import in_opmath, mul, power
from fmapper_adapters.jax.aten.pointwise.comparisons import is_nan
from fmapper_adapters.jax.aten.table import lowering, pointwise
from fmapper_adapters.jax.aten.types import (
    cast,
    dtype_of,
    is_complex,
    is_floating,
    promote,
    wide,
)


def _unary(
    function: Callable[..., Any],
    *ops: str,
    to_float: bool = False,
    int64: Literal["computes", "looks"] = "computes",
) -> None:
    """Registers a function of one array; halves are computed in float32 and rounded once."""

    def lower(x: Any) -> jax.Array:
        (x,) = promote(x, to_float=to_float)
        if is_floating(x) and wide(x.dtype) != x.dtype:
            return function(x.astype(wide(x.dtype))).astype(x.dtype)
        return function(x)

    lowering(*ops, int64=int64, dims=pointwise)(lower)


def absolute(x: Any) -> jax.Array:
    """Returns absolute values, also of complex numbers; the gradient at zero is zero."""
    if not (is_floating(x) or is_complex(x)):
        return x if x.dtype.kind in "bu" else jnp.abs(x)
    zero = x == 0
    return jnp.where(zero, 0, jnp.abs(jnp.where(zero, 1, x)))


def _sign(x: Any) -> jax.Array:
    """Returns 1, 0 or -1, and 0 for NaN; complex numbers are divided by their magnitude."""
    if is_complex(x):
        size = jnp.abs(x)
        return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size)).astype(x.dtype)
    if x.dtype == bool:
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a rounding function that leaves integers as they are."""
    return lambda x: function(x) if is_floating(x) else x


def _log2(x: Any) -> jax.Array:
    """Returns the logarithm to base 2, exact where it is whole."""
    y, base = jnp.log(x), np.log(2).astype(x.real.dtype)
    if is_complex(x):
        return jax.lax.complex(y.real / base, y.imag / base)
    y = y / base
    fixed = jax.lax.stop_gradient(y)
    whole = jnp.round(jnp.where(jnp.isfinite(fixed), fixed, 0))
    exact = jnp.ldexp(jnp.ones_like(x), whole.astype(jnp.int32)) == x
    return y + jnp.where(exact, whole - jnp.where(exact, fixed, 0), 0)


def _exp2(x: Any) -> jax.Array:
    """Computes 2 ** x, exact where x is whole."""
    if is_complex(x):  # separate parts, since infinity times 0j would be NaN
        power = np.log(2).astype(x.real.dtype)
        return jnp.exp(jax.lax.complex(x.real * power, x.imag * power))
    return jnp.power(jnp.asarray(2, x.dtype), x)


def _sigmoid(x: Any) -> jax.Array:
    y = jax.nn.sigmoid(x)
    if not jnp.iscomplexobj(x):
        return y
    power = jnp.exp(-x)  # torch divides by it, which gives NaN where both parts are infinite
    return jnp.where(jnp.isinf(power.real) & jnp.isinf(power.imag), complex(np.nan, np.nan), y)


def _sinc(x: Any) -> jax.Array:
    """Computes sinc, NaN at infinity, where JAX from 0.11 on gives the limit."""
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.sinc(x))


_unary(jnp.negative, "aten::neg")
_unary(lambda x: x, "aten::positive")
_unary(absolute, "aten::abs")
_unary(_sign, "aten::sign", "aten::sgn", int64="looks")
_unary(lambda x: x.astype(dtype_of("int64")) if x.dtype == bool else x * x, "aten::square")
_unary(lambda x: 1 / x, "aten::reciprocal", to_float=True)
_unary(jnp.sqrt, "aten::sqrt", to_float=True)
_unary(lambda x: 1 / jnp.sqrt(x), "aten::rsqrt", to_float=True)
_unary(jnp.exp, "aten::exp", to_float=True)
_unary(_exp2, "aten::exp2", to_float=True)
_unary(jnp.expm1, "aten::expm1", to_float=True)
_unary(jnp.log, "aten::log", to_float=True)
_unary(_log2, "aten::log2", to_float=True)
_unary(jnp.log10, "aten::log10", to_float=True)
_unary(jnp.log1p, "aten::log1p", to_float=True)
_unary(jnp.sin, "aten::sin", to_float=True)
_unary(jnp.cos, "aten::cos", to_float=True)
_unary(jnp.tan, "aten::tan", to_float=True)
_unary(jnp.arcsin, "aten::asin", to_float=True)
_unary(jnp.arccos, "aten::acos", to_float=True)
_unary(jnp.arctan, "aten::atan", to_float=True)
_unary(jnp.sinh, "aten::sinh", to_float=True)
_unary(jnp.cosh, "aten::cosh", to_float=True)
_unary(jnp.tanh, "aten::tanh", to_float=True)
_unary(jnp.arcsinh, "aten::asinh", to_float=True)
_unary(jnp.arccosh, "aten::acosh", to_float=True)
_unary(jnp.arctanh, "aten::atanh", to_float=True)
_unary(_sigmoid, "aten::sigmoid", to_float=True)
_unary(_sinc, "aten::sinc", to_float=True)
_unary(lambda x: x * (np.pi / 180), "aten::deg2rad", to_float=True)
_unary(lambda x: x * (180 / np.pi), "aten::rad2deg", to_float=True)
_unary(_whole(jnp.floor), "aten::floor")
_unary(_whole(jnp.ceil), "aten::ceil")
_unary(_whole(jnp.trunc), "aten::trunc")
_unary(lambda x: x - jnp.trunc(x), "aten::frac")


@lowering("aten::round")
def round_to(x: Any, *, decimals: int = 0) -> jax.Array:
    """Rounds to the nearest whole number or decimal, halves to even."""
    if not is_floating(x):
        return x
    y = x.astype(wide(x.dtype))
    if decimals == 0:
        return jnp.round(y).astype(x.dtype)
    scale = cast(10.0 ** abs(decimals), y.dtype)
    y = jnp.round(y * scale) / scale if decimals > 0 else jnp.round(y / scale) * scale
    return y.astype(x.dtype)


@lowering("aten::nan_to_num", dims=pointwise)
def nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> jax.Array:
    """Returns numbers in place of NaN and infinity: zero and the ends of the dtype unless given."""
    if is_complex(x):
        parts = (nan_to_num(part, nan, posinf, neginf) for part in (x.real, x.imag))
        return jax.lax.complex(*parts)
    if not is_floating(x):
        return x
    ends = jnp.finfo(x.dtype)
    x = jnp.where(jnp.isnan(x), cast(nan or 0.0, x.dtype), x)
    x = jnp.where(x == jnp.inf, cast(ends.max if posinf is None else posinf, x.dtype), x)
    return jnp.where(x == -jnp.inf, cast(ends.min if neginf is None else neginf, x.dtype), x)


@lowering("aten::heaviside", dims=pointwise)
def heaviside(x: Any, values: Any) -> jax.Array:
    """Returns 0 below zero and for NaN, 1 above, and `values` at zero."""
    x, values = promote(x, values)
    return jnp.where(x == 0, values, (x > 0).astype(x.dtype))


@lowering("aten::copysign")
def copysign(x: Any, y: Any) -> jax.Array:
    """Returns the magnitude of x with the sign of y; where x is zero, the gradient is zero."""
    x, y = promote(x, y, to_float=True)
    x, y = jnp.broadcast_arrays(x, y)
    size = absolute(x)
    return jnp.where(jnp.signbit(jax.lax.stop_gradient(y)), -size, size)


@lowering("aten::hypot", dims=pointwise)
def hypot(x: Any, y: Any) -> jax.Array:
    """Returns the root of the sum of squares, without overflow."""
    dtype, (x, y) = in_opmath(x, y)
    return _hypot(*jnp.broadcast_arrays(x, y)).astype(dtype)


@jax.custom_jvp
def _hypot(x: Any, y: Any) -> jax.Array:
    return jnp.hypot(x, y)


_hypot.defjvps(
    lambda slope, value, x, y: slope * (x / value), lambda slope, value, x, y: slope * (y / value)
)


@lowering("aten::atan2")
def atan2(x: Any, y: Any) -> jax.Array:
    """Returns the angle of the point (y, x)."""
    dtype, (x, y) = in_opmath(x, y, to_float=True)
    angle = jnp.arctan2(x, y)
    is_origin = (x == 0) & (y == 0)  # where torch's derivative is zero, and JAX's is NaN
    away = jnp.arctan2(jnp.where(is_origin, 0, x), jnp.where(is_origin, 1, y))
    return jnp.where(is_origin, jax.lax.stop_gradient(angle), away).astype(dtype)


@lowering("aten::nextafter", dims=pointwise)
def nextafter(x: Any, y: Any) -> jax.Array:
    """Returns the next number of the dtype from x towards y; its derivative by x is 1 if x != y."""
    return _nextafter(*jnp.broadcast_arrays(*promote(x, y)))


@jax.custom_jvp
def _nextafter(x: Any, y: Any) -> jax.Array:
    return jnp.nextafter(x, y)


_nextafter.defjvps(lambda slope, value, x, y: jnp.where(x == y, 0, slope), None)


@lowering("aten::frexp")
def frexp(x: Any) -> tuple[jax.Array, jax.Array]:
    """Returns mantissas in [0.5, 1) and exponents of 2."""
    mantissa, exponent = jnp.frexp(x.astype(wide(x.dtype)))
    return mantissa.astype(x.dtype), exponent.astype(jnp.int32)


@lowering("aten::ldexp")
def ldexp(x: Any, y: Any) -> jax.Array:
    """Computes `x * 2 ** y`."""
    return mul(x, power(2.0, y))


@lowering("aten::gcd")
def gcd(x: Any, y: Any) -> jax.Array:
    """Returns the greatest common divisor."""
    return jnp.gcd(*promote(x, y))


@lowering("aten::lcm", dims=pointwise)
def lcm(x: Any, y: Any) -> jax.Array:
    """Returns the least common multiple."""
    return jnp.lcm(*promote(x, y))


@lowering("aten::relu", dims=pointwise)
def relu(x: Any) -> jax.Array:
    """Returns the larger of x and zero; NaN and -0.0 stay, and the gradient at zero is zero."""
    fixed, zero = jax.lax.stop_gradient(x), jnp.zeros((), x.dtype)
    return jnp.where(x <= 0, jnp.where(fixed < 0, zero, fixed), x)


@lowering("aten::silu", dims=pointwise)
def silu(x: Any) -> jax.Array:
    """Computes `x * sigmoid(x)`, halves in float32."""
    y = x.astype(wide(x.dtype))
    return (y * jax.nn.sigmoid(y)).astype(x.dtype)


@lowering("aten::gelu", dims=pointwise)
def gelu(x: Any, *, approximate: str = "none") -> jax.Array:
    """Returns the Gaussian error linear unit, halves in float32.

    It uses erf, as torch does: `jax.nn.gelu` takes erfc, for which XLA computes more on the CPU.
    """
    y = x.astype(wide(x.dtype))
    if approximate == "tanh":
        return jax.nn.gelu(y, approximate=True).astype(x.dtype)
    return (0.5 * y * (1 + jax.lax.erf(y * 0.5**0.5))).astype(x.dtype)


# --- complex numbers ------------------------------------------------------------------------


@lowering("aten::complex")
def complex_of(real: Any, imag: Any) -> jax.Array:
    """Makes complex numbers from their parts."""
    real, imag = promote(real, imag)
    if wide(real.dtype) != real.dtype:
        raise ConversionError("complex: only torch has complex32. Cast the parts to float32.")
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering("aten::polar")
def polar(size: Any, angle: Any) -> jax.Array:
    """Makes complex numbers from their magnitudes and angles."""
    return complex_of(size * jnp.cos(angle), size * jnp.sin(angle))


lowering("aten::real")(jnp.real)
lowering("aten::imag")(jnp.imag)
lowering(
    "aten::_conj", "aten::conj_physical", "aten::_conj_physical", "aten::conj", dims=pointwise
)(lambda x: jnp.conj(x) if is_complex(x) else x)
lowering("aten::_neg_view")(jnp.negative)


@lowering("aten::angle")
def angle(x: Any) -> jax.Array:
    """Returns the angle of complex numbers; of others 0 or, where they are negative, pi."""
    (x,) = promote(x, to_float=True)
    if is_complex(x):
        return atan2(x.imag, x.real)
    return jnp.where(x < 0, cast(np.pi, x.dtype), jnp.where(is_nan(x), x, 0))


# --- copies ---------------------------------------------------------------------------------


@lowering("aten::_to_copy", "aten::to", int64="casts", dims=pointwise)
def to_copy(x: Any, *, dtype: Any = None) -> jax.Array:
    """Casts the array to another dtype."""
    return x if dtype is None else cast(x, dtype)


@lowering(
    "aten::clone",
    "aten::alias",
    "aten::contiguous",
    "aten::resolve_conj",
    "aten::resolve_neg",
    "aten::lift_fresh",
    int64="moves",
    dims=pointwise,
)
@lowering("aten::detach", "aten::lift_fresh_copy", whole=False, int64="moves", dims=pointwise)
def clone(x: Any) -> jax.Array:
    """Returns the array itself: there are no views here."""
    return x


@lowering("aten::copy", int64="moves")
def copy(x: Any, source: Any, non_blocking: bool = False) -> jax.Array:
    """Returns the values of another array, in the shape and dtype of this one."""
    return jnp.broadcast_to(cast(source, x.dtype), x.shape)


@lowering("aten::fill", whole=False, int64="moves", elements=(1,))
def fill(x: Any, value: Any) -> jax.Array:
    """Returns an array of one value, in the shape and dtype of another."""
    return jnp.broadcast_to(cast(value, x.dtype), x.shape)
