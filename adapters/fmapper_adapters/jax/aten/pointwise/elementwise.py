"""Elementwise arithmetic, comparison and activation functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ConversionError
from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import (
    cast,
    dtype_of,
    is_complex,
    is_floating,
    is_integral,
    is_number,
    promote,
    result_type,
    saturated,
    wide,
    within,
)

# --- arithmetic -----------------------------------------------------------------------------


def in_opmath(*operands: Any, to_float: bool = False, exact: bool = False) -> tuple[Any, Any]:
    """The dtype of a result, and the operands in the dtype that torch computes it in.

    Halves are computed in float32 and rounded once. Numbers, and arrays without dimensions among
    others that have some, are rounded to the half first as torch does on a CPU, unless they are to
    be `exact`, as in products.
    """
    dtype = promote(*operands, to_float=to_float)[0].dtype if to_float else result_type(*operands)
    inner = wide(dtype)
    ranked = any(np.ndim(x) for x in operands if x is not None)

    def entering(x: Any) -> Any:
        if x is None:
            return None
        if inner == dtype or (exact and (is_number(x) or (ranked and x.ndim == 0))):
            return cast(x, inner)
        return cast(cast(x, dtype), inner)

    return dtype, tuple(map(entering, operands))


def _factor(number: Any, dtype: Any) -> Any:
    """A factor as the dtype of the result holds it; 1 stays what it is."""
    one = isinstance(number, int | float) and number == 1
    return 1 if one else cast(number, dtype).astype(wide(dtype))


@lowering("aten::add", elements=(0, 1))
def add(x: Any, y: Any, *, alpha: Any = 1) -> jax.Array:
    """`x + alpha * y`; or, for bool, logical or."""
    dtype, (x, y) = in_opmath(x, y)
    if _is_bool(dtype):
        return x | (y & bool(alpha))
    return (x + _times(_factor(alpha, dtype), y)).astype(dtype)


@lowering("aten::sub", elements=(0, 1))
def sub(x: Any, y: Any, *, alpha: Any = 1) -> jax.Array:
    """`x - alpha * y`."""
    dtype, (x, y) = in_opmath(x, y)
    return (x - _times(_factor(alpha, dtype), y)).astype(dtype)


@lowering("aten::rsub", whole=False, elements=(0, 1))
def rsub(x: Any, y: Any, alpha: Any = 1) -> jax.Array:
    """`y - alpha * x`."""
    return sub(y, x, alpha=alpha)


def _times(number: Any, x: Any) -> Any:
    return x if isinstance(number, int | float) and number == 1 else cast(number, x.dtype) * x


@lowering("aten::mul", elements=(0, 1))
def mul(x: Any, y: Any) -> jax.Array:
    """The product; for bool, logical and."""
    dtype, (x, y) = in_opmath(x, y, exact=True)
    return x & y if _is_bool(dtype) else (x * y).astype(dtype)


@lowering("aten::div", elements=(0, 1))
def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> jax.Array:
    """The quotient; integers give floats unless it is rounded (`trunc` or `floor`)."""
    dtype, (x, y) = in_opmath(x, y, to_float=rounding_mode is None, exact=True)
    if rounding_mode is None:
        return (x / y).astype(dtype)
    x, y = jax.lax.stop_gradient(jnp.broadcast_arrays(x, y))
    if not is_floating(x):
        return jax.lax.div(x, y) if rounding_mode == "trunc" else jnp.floor_divide(x, y)
    return (jnp.trunc(x / y) if rounding_mode == "trunc" else _floor_of(x, y)).astype(dtype)


@lowering("aten::floor_divide", elements=(0, 1))
def floor_divide(x: Any, y: Any) -> jax.Array:
    """The quotient rounded down."""
    return div(x, y, rounding_mode="floor")


def _floor_of(x: Any, y: Any) -> jax.Array:
    """The quotient of floats rounded down as Python does it, from the exact remainder."""
    rest = jax.lax.rem(x, y)
    quotient = (x - rest) / y
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    below = jnp.floor(quotient)
    whole = jnp.where(quotient - below > 0.5, below + 1, below)
    whole = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(x), x / y), whole)
    return jnp.where(y == 0, x / y, whole)


@lowering("aten::remainder", elements=(0, 1))
def remainder(x: Any, y: Any) -> jax.Array:
    """The rest of the division rounded down, of the sign of the divisor."""
    dtype, (x, y) = in_opmath(x, y)
    rest = jax.lax.rem(*jnp.broadcast_arrays(x, y))
    other_sign = (rest != 0) & ((y < 0) != (rest < 0))
    return jnp.where(other_sign, rest + y, rest).astype(dtype)


@lowering("aten::fmod", elements=(0, 1))
def fmod(x: Any, y: Any) -> jax.Array:
    """The rest of the division rounded to zero, of the sign of the dividend."""
    dtype, (x, y) = in_opmath(x, y)
    return jax.lax.rem(*jnp.broadcast_arrays(x, y)).astype(dtype)


@lowering("aten::pow", elements=(0, 1))
def power(x: Any, y: Any) -> jax.Array:
    """`x ** y`, with torch's special cases for exponents that are numbers."""
    dtype, (base, exponent) = in_opmath(x, y, exact=True)
    if not (is_floating(dtype) or is_complex(dtype)):
        known = isinstance(y, int) and not isinstance(y, bool)
        return jax.lax.integer_pow(base, y) if known and y >= 0 else _integer_power(base, exponent)
    if isinstance(y, int | float) and not isinstance(y, bool):
        return _known_power(base, y).astype(dtype)
    if is_complex(dtype):
        return _complex_power(base, exponent)
    # Powers of 0 to the 0 have no slope, as in torch: JAX gives them NaN.
    return jnp.power(jnp.where((base == 0) & (exponent == 0), 1, base), exponent).astype(dtype)


def _known_power(x: Any, y: float) -> jax.Array:
    if y == 0:
        return jnp.ones_like(x)
    if y in (1, 2, 3):
        return jax.lax.integer_pow(x, int(y))
    if y in (-1, -2):
        return 1 / jax.lax.integer_pow(x, -int(y))
    if y == 0.5:
        return jnp.sqrt(x)
    if y == -0.5:
        return 1 / jnp.sqrt(x)
    return (_complex_power if is_complex(x) else jnp.power)(x, cast(y, x.dtype))


def _complex_power(x: Any, y: Any) -> jax.Array:
    """As torch has it, of zero and of infinite numbers, too."""
    none = (x == 0) & (y.real > 0)
    return jnp.where(none, 0, jnp.exp(y * jnp.log(jnp.where(none, 1, x))))


def _integer_power(x: Any, y: Any) -> jax.Array:
    """Wraps as torch does; negative exponents give zero unless x is 1 or -1."""
    dtype = x.dtype
    if _is_bool(dtype):
        return x | ~y
    x, y = jnp.broadcast_arrays(x, y)
    result, square, rest = jnp.ones_like(x), x, jnp.maximum(y, 0)
    for _ in range(8 * dtype.itemsize - is_signed(dtype)):
        result = jnp.where(rest & 1 == 1, result * square, result)
        square, rest = square * square, rest >> 1
    of_minus_one = jnp.where(y & 1 == 1, -jnp.ones_like(x), jnp.ones_like(x))
    inverse = jnp.where(x == 1, x, jnp.where(x + 1 == 0, of_minus_one, jnp.zeros_like(x)))
    return jnp.where(y < 0, inverse, result) if is_signed(dtype) else result


def _is_bool(dtype: Any) -> bool:
    return np.dtype(dtype).kind == "b"


def is_nan(x: Any) -> Any:
    """Where elements are NaN; nowhere for integers."""
    return jnp.isnan(x) if _inexact(x) else jnp.zeros(x.shape, bool)


def is_signed(dtype: Any) -> bool:
    """Whether an integer dtype has negative numbers."""
    return bool(jnp.issubdtype(dtype, jnp.signedinteger))


@lowering("aten::addcmul")
def addcmul(x: Any, y: Any, z: Any, *, value: Any = 1) -> jax.Array:
    """`x + value * y * z`."""
    dtype, (x, y, z) = in_opmath(x, y, z, exact=True)
    return (x + _times(value, y) * z).astype(dtype)


@lowering("aten::addcdiv")
def addcdiv(x: Any, y: Any, z: Any, *, value: Any = 1) -> jax.Array:
    """`x + value * y / z`."""
    dtype, (x, y, z) = in_opmath(x, y, z, exact=True)
    return (x + _times(value, y) / z).astype(dtype)


@lowering("aten::lerp")
def lerp(start: Any, end: Any, weight: Any) -> jax.Array:
    """Between start and end, counted from the nearer one."""
    dtype, (x, y, w) = in_opmath(start, end, weight, exact=True)
    near = jnp.abs(w) < 0.5
    return jnp.where(near, x + w * (y - x), y - (y - x) * (1 - w)).astype(dtype)


def _unary(
    function: Callable[..., Any],
    *ops: str,
    to_float: bool = False,
    int64: Literal["computes", "looks"] = "computes",
) -> None:
    """Enters a function of one array; halves are computed in float32 and rounded once."""

    def lowered(x: Any) -> jax.Array:
        (x,) = promote(x, to_float=to_float)
        if is_floating(x) and wide(x.dtype) != x.dtype:
            return function(x.astype(wide(x.dtype))).astype(x.dtype)
        return function(x)

    lowering(*ops, int64=int64)(lowered)


def absolute(x: Any) -> jax.Array:
    """Absolute values, of complex numbers too; the gradient at zero is zero."""
    if not (is_floating(x) or is_complex(x)):
        return x if x.dtype.kind in "bu" else jnp.abs(x)
    zero = x == 0
    return jnp.where(zero, 0, jnp.abs(jnp.where(zero, 1, x)))


def _sign(x: Any) -> jax.Array:
    """1, 0 or -1, where NaN gives 0; for complex numbers the number over its absolute value."""
    if is_complex(x):
        size = jnp.abs(x)
        return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size)).astype(x.dtype)
    if x.dtype == bool:
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rounding function, which leaves integers as they are."""
    return lambda x: function(x) if is_floating(x) else x


def _log2(x: Any) -> jax.Array:
    """The logarithm to base 2, exact where it is whole."""
    y = jnp.log(x) / np.log(2).astype(x.real.dtype)
    if is_complex(x):
        return y
    fixed = jax.lax.stop_gradient(y)
    whole = jnp.round(jnp.where(jnp.isfinite(fixed), fixed, 0))
    exact = jnp.ldexp(jnp.ones_like(x), whole.astype(jnp.int32)) == x
    return y + jnp.where(exact, whole - jnp.where(exact, fixed, 0), 0)


def _exp2(x: Any) -> jax.Array:
    """2 ** x, exact where x is whole."""
    if is_complex(x):
        return jnp.exp(x * np.log(2).astype(x.real.dtype))
    return jnp.power(jnp.asarray(2, x.dtype), x)


def _sinc(x: Any) -> jax.Array:
    """NaN at infinity, where JAX from 0.11 on gives the limit."""
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
_unary(jax.nn.sigmoid, "aten::sigmoid", to_float=True)
_unary(_sinc, "aten::sinc", to_float=True)
_unary(lambda x: x * (np.pi / 180), "aten::deg2rad", to_float=True)
_unary(lambda x: x * (180 / np.pi), "aten::rad2deg", to_float=True)
_unary(_whole(jnp.floor), "aten::floor")
_unary(_whole(jnp.ceil), "aten::ceil")
_unary(_whole(jnp.trunc), "aten::trunc")
_unary(lambda x: x - jnp.trunc(x), "aten::frac")


@lowering("aten::round")
def rounded(x: Any, *, decimals: int = 0) -> jax.Array:
    """To the nearest whole number or decimal, halves to even."""
    if not is_floating(x):
        return x
    y = x.astype(wide(x.dtype))
    if decimals == 0:
        return jnp.round(y).astype(x.dtype)
    scale = cast(10.0 ** abs(decimals), y.dtype)
    y = jnp.round(y * scale) / scale if decimals > 0 else jnp.round(y / scale) * scale
    return y.astype(x.dtype)


@lowering("aten::nan_to_num")
def nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> jax.Array:
    """Numbers in place of NaN and infinity: zero and the ends of the dtype unless given."""
    if is_complex(x):
        parts = (nan_to_num(part, nan, posinf, neginf) for part in (x.real, x.imag))
        return jax.lax.complex(*parts)
    if not is_floating(x):
        return x
    ends = jnp.finfo(x.dtype)
    x = jnp.where(jnp.isnan(x), cast(nan or 0.0, x.dtype), x)
    x = jnp.where(x == jnp.inf, cast(ends.max if posinf is None else posinf, x.dtype), x)
    return jnp.where(x == -jnp.inf, cast(ends.min if neginf is None else neginf, x.dtype), x)


@lowering("aten::heaviside")
def heaviside(x: Any, values: Any) -> jax.Array:
    """0 below zero and for NaN, 1 above, and `values` at zero."""
    x, values = promote(x, values)
    return jnp.where(x == 0, values, (x > 0).astype(x.dtype))


@lowering("aten::copysign")
def copysign(x: Any, y: Any) -> jax.Array:
    """The size of x with the sign of y; where x is zero the gradient is."""
    x, y = promote(x, y, to_float=True)
    x, y = jnp.broadcast_arrays(x, y)
    size = jnp.abs(x)
    return jnp.where(jnp.signbit(jax.lax.stop_gradient(y)), -size, size)


@lowering("aten::hypot")
def hypot(x: Any, y: Any) -> jax.Array:
    """The root of the sum of squares, without overflow."""
    dtype, (x, y) = in_opmath(x, y)
    x = jnp.where(jnp.isinf(y), 0, x)  # whose derivative is then 0, as in torch, and not NaN
    y = jnp.where(jnp.isinf(x), 0, y)
    return jnp.hypot(x, y).astype(dtype)


@lowering("aten::atan2")
def atan2(x: Any, y: Any) -> jax.Array:
    """The angle of the point (y, x)."""
    dtype, (x, y) = in_opmath(x, y, to_float=True)
    return jnp.arctan2(x, y).astype(dtype)


@lowering("aten::nextafter")
def nextafter(x: Any, y: Any) -> jax.Array:
    """The next number of the dtype from x towards y; it grows as x does, as torch has it."""
    return _nextafter(*jnp.broadcast_arrays(*promote(x, y)))


@jax.custom_jvp
def _nextafter(x: Any, y: Any) -> jax.Array:
    return jnp.nextafter(x, y)


_nextafter.defjvps(lambda slope, value, x, y: jnp.where(x == y, 0, slope), None)


@lowering("aten::frexp")
def frexp(x: Any) -> tuple[jax.Array, jax.Array]:
    """Mantissas in [0.5, 1) and exponents of 2."""
    mantissa, exponent = jnp.frexp(x.astype(wide(x.dtype)))
    return mantissa.astype(x.dtype), exponent.astype(jnp.int32)


@lowering("aten::ldexp")
def ldexp(x: Any, y: Any) -> jax.Array:
    """`x * 2 ** y`."""
    return mul(x, power(2.0, y))


@lowering("aten::gcd")
def gcd(x: Any, y: Any) -> jax.Array:
    """The greatest common divisor."""
    return jnp.gcd(*promote(x, y))


@lowering("aten::lcm")
def lcm(x: Any, y: Any) -> jax.Array:
    """The least common multiple."""
    return jnp.lcm(*promote(x, y))


@lowering("aten::relu")
def relu(x: Any) -> jax.Array:
    """The larger of x and zero; NaN stays, and the gradient at zero is zero."""
    return jnp.where(x <= 0, jnp.zeros((), x.dtype), x)


@lowering("aten::silu")
def silu(x: Any) -> jax.Array:
    """`x * sigmoid(x)`, halves in float32."""
    y = x.astype(wide(x.dtype))
    return (y * jax.nn.sigmoid(y)).astype(x.dtype)


@lowering("aten::gelu")
def gelu(x: Any, *, approximate: str = "none") -> jax.Array:
    """The Gaussian error linear unit, halves in float32."""
    y = x.astype(wide(x.dtype))
    return jax.nn.gelu(y, approximate=approximate == "tanh").astype(x.dtype)


# --- the larger and the smaller -------------------------------------------------------------


@lowering("aten::clamp", int64="moves")
def clamp(x: Any, min: Any = None, max: Any = None) -> jax.Array:
    """Within bounds, the upper one first; NaN on any side stays; x at a bound has a gradient."""
    if is_integral(x):
        min, max = saturated(min), saturated(max)
    x, low, high = promote(x, min, max)
    if low is not None:
        x = jnp.where((x < low) | is_nan(low), low, x)
    if high is not None:
        x = jnp.where((x > high) | is_nan(high) & ~is_nan(x), high, x)
    return x


@lowering("aten::clamp_min", whole=False, int64="moves")
def clamp_min(x: Any, min: Any) -> jax.Array:
    """Not below a bound."""
    return clamp(x, min)


@lowering("aten::clamp_max", whole=False, int64="moves")
def clamp_max(x: Any, max: Any) -> jax.Array:
    """Not above a bound."""
    return clamp(x, None, max)


@lowering("aten::maximum", int64="moves")
@lowering("aten::max.other", whole=False, int64="moves")
def maximum(x: Any, y: Any) -> jax.Array:
    """The larger one, or NaN where one is NaN."""
    return _maximum(*jnp.broadcast_arrays(*promote(x, y)))


@lowering("aten::minimum", int64="moves")
@lowering("aten::min.other", whole=False, int64="moves")
def minimum(x: Any, y: Any) -> jax.Array:
    """The smaller one, or NaN where one is NaN."""
    return _minimum(*jnp.broadcast_arrays(*promote(x, y)))


@jax.custom_jvp
def _maximum(x: Any, y: Any) -> jax.Array:
    """`jnp.maximum`; the one that is not taken gets no gradient, not even of NaN, as in torch."""
    return jnp.maximum(x, y)


@jax.custom_jvp
def _minimum(x: Any, y: Any) -> jax.Array:
    return jnp.minimum(x, y)


def _shared(slope: Any, one: Any, other: Any, taken: Any) -> jax.Array:
    return jnp.where(one == other, slope / 2, jnp.where(taken, slope, 0))


_maximum.defjvps(
    lambda slope, value, x, y: _shared(slope, x, y, ~(x < y)),
    lambda slope, value, x, y: _shared(slope, y, x, ~(y < x)),
)
_minimum.defjvps(
    lambda slope, value, x, y: _shared(slope, x, y, ~(x > y)),
    lambda slope, value, x, y: _shared(slope, y, x, ~(y > x)),
)


@lowering("aten::fmax")
def fmax(x: Any, y: Any) -> jax.Array:
    """The larger one, or the one that is not NaN."""
    x, y = promote(x, y)
    return jnp.where((x >= y) | is_nan(y), x, y)


@lowering("aten::fmin")
def fmin(x: Any, y: Any) -> jax.Array:
    """The smaller one, or the one that is not NaN."""
    x, y = promote(x, y)
    return jnp.where((x <= y) | is_nan(y), x, y)


# --- comparison and logic -------------------------------------------------------------------


def _binary(function: Callable[..., Any], *ops: str) -> None:
    lowering(*ops, elements=(0, 1))(lambda x, y: function(*promote(x, y)))


def _comparison(function: Callable[..., Any], *ops: str) -> None:
    """Enters one of two operands; a number that no integer reaches is infinite."""
    lowering(*ops, int64="looks")(lambda x, y: function(*promote(within(x, y), within(y, x))))


_comparison(jnp.equal, "aten::eq")
_comparison(jnp.not_equal, "aten::ne")
_comparison(jnp.less, "aten::lt")
_comparison(jnp.less_equal, "aten::le")
_comparison(jnp.greater, "aten::gt")
_comparison(jnp.greater_equal, "aten::ge")
_binary(jnp.bitwise_and, "aten::bitwise_and")
_binary(jnp.bitwise_or, "aten::bitwise_or")
_binary(jnp.bitwise_xor, "aten::bitwise_xor")
lowering("aten::logical_and", int64="looks")(jnp.logical_and)
lowering("aten::logical_or", int64="looks")(jnp.logical_or)
lowering("aten::logical_xor", int64="looks")(jnp.logical_xor)
lowering("aten::logical_not", int64="looks")(jnp.logical_not)
lowering("aten::bitwise_not")(jnp.invert)
lowering("aten::isnan", int64="looks")(is_nan)
lowering("aten::isinf", int64="looks")(
    lambda x: jnp.isinf(x) if _inexact(x) else jnp.zeros(x.shape, bool)
)
lowering("aten::isfinite", int64="looks")(
    lambda x: jnp.isfinite(x) if _inexact(x) else jnp.ones(x.shape, bool)
)
lowering("aten::isposinf")(lambda x: x == jnp.inf if _inexact(x) else jnp.zeros(x.shape, bool))
lowering("aten::isneginf")(lambda x: x == -jnp.inf if _inexact(x) else jnp.zeros(x.shape, bool))
lowering("aten::isreal", whole=False)(
    lambda x: x.imag == 0 if is_complex(x) else jnp.ones(x.shape, bool)
)


def _inexact(x: Any) -> bool:
    return is_floating(x) or is_complex(x)


@lowering("aten::signbit")
def signbit(x: Any) -> jax.Array:
    """Whether the sign is negative, also that of zero and NaN."""
    if x.dtype == bool:
        return jnp.zeros(x.shape, bool)
    return jnp.signbit(x) if is_floating(x) else x < 0


@lowering("aten::bitwise_left_shift", "aten::__lshift__")
def left_shift(x: Any, y: Any) -> jax.Array:
    """Bits to the left; a shift that is negative or too wide gives zero."""
    x, y = promote(x, y)
    if is_floating(x):
        return x * jnp.power(jnp.asarray(2, x.dtype), y)
    inside = (y >= 0) & (y < 8 * x.dtype.itemsize)
    return jnp.where(inside, jnp.left_shift(x, jnp.where(inside, y, 0)), 0)


@lowering("aten::bitwise_right_shift", "aten::__rshift__")
def right_shift(x: Any, y: Any) -> jax.Array:
    """Bits to the right with the sign; a shift that is negative or too wide leaves only that."""
    x, y = promote(x, y)
    if is_floating(x):
        return x / jnp.power(jnp.asarray(2, x.dtype), y)
    bits = 8 * x.dtype.itemsize
    inside = (y >= 0) & (y < bits)
    left = jnp.right_shift(x, jnp.asarray(bits - 1, x.dtype)) if is_signed(x.dtype) else 0
    return jnp.where(inside, jnp.right_shift(x, jnp.where(inside, y, 0)), left).astype(x.dtype)


@lowering("aten::where.self", int64="moves", elements=(1, 2))
@lowering(
    "aten::where.ScalarOther",
    "aten::where.ScalarSelf",
    "aten::where.Scalar",
    whole=False,
    int64="moves",
    elements=(1, 2),
)
def where(condition: Any, x: Any, y: Any) -> jax.Array:
    """X where the condition holds, else y."""
    x, y = promote(x, y)
    return jnp.where(condition.astype(bool), x, y)


# --- complex numbers ------------------------------------------------------------------------


@lowering("aten::complex")
def complex_of(real: Any, imag: Any) -> jax.Array:
    """Complex numbers from their parts."""
    real, imag = promote(real, imag)
    if wide(real.dtype) != real.dtype:
        raise ConversionError("complex: only torch has complex32. Cast the parts to float32.")
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering("aten::polar")
def polar(size: Any, angle: Any) -> jax.Array:
    """Complex numbers from their sizes and angles."""
    return complex_of(size * jnp.cos(angle), size * jnp.sin(angle))


lowering("aten::real")(jnp.real)
lowering("aten::imag")(jnp.imag)
lowering("aten::_conj", "aten::conj_physical", "aten::_conj_physical", "aten::conj")(
    lambda x: jnp.conj(x) if is_complex(x) else x
)
lowering("aten::_neg_view")(jnp.negative)


@lowering("aten::angle")
def angle(x: Any) -> jax.Array:
    """The angle of complex numbers; of others 0 or, where they are negative, pi."""
    (x,) = promote(x, to_float=True)
    if is_complex(x):
        return jnp.arctan2(x.imag, x.real)
    return jnp.where(x < 0, cast(np.pi, x.dtype), jnp.where(is_nan(x), x, 0))


# --- copies ---------------------------------------------------------------------------------


@lowering("aten::_to_copy", "aten::to", int64="casts")
def to_copy(x: Any, *, dtype: Any = None) -> jax.Array:
    """The array as another dtype."""
    return x if dtype is None else cast(x, dtype)


@lowering(
    "aten::clone",
    "aten::alias",
    "aten::contiguous",
    "aten::resolve_conj",
    "aten::resolve_neg",
    "aten::lift_fresh",
    int64="moves",
)
@lowering("aten::detach", "aten::lift_fresh_copy", whole=False, int64="moves")
def clone(x: Any) -> jax.Array:
    """The array itself: there are no views here."""
    return x


@lowering("aten::copy", int64="moves")
def copy(x: Any, source: Any, non_blocking: bool = False) -> jax.Array:
    """The values of another array, in the shape and dtype of this one."""
    return jnp.broadcast_to(cast(source, x.dtype), x.shape)


@lowering("aten::fill", whole=False, int64="moves", elements=(1,))
def fill(x: Any, value: Any) -> jax.Array:
    """One value, in the shape and dtype of the array."""
    return jnp.broadcast_to(cast(value, x.dtype), x.shape)
