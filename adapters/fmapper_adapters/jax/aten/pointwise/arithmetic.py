"""Sums, products, quotients and powers, and combinations of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.pointwise.comparisons import is_signed
from fmapper_adapters.jax.aten.table import lowering, pointwise
from fmapper_adapters.jax.aten.types import (
    cast,
    is_complex,
    is_floating,
    is_number,
    promote,
    result_type,
    wide,
)

# --- arithmetic -----------------------------------------------------------------------------


def in_opmath(*operands: Any, to_float: bool = False, exact: bool = False) -> tuple[Any, Any]:
    """Returns the dtype of a result, and the operands in the dtype that torch computes it in.

    Halves are computed in float32 and rounded once. Numbers, and arrays without dimensions among
    others that have some, are rounded to the half first as torch does on a CPU, unless they are to
    be `exact`, as in products.
    """
    dtype = promote(*operands, to_float=to_float)[0].dtype if to_float else result_type(*operands)
    inner = wide(dtype)
    ranked = any(np.ndim(x) for x in operands if x is not None)

    def widen(x: Any) -> Any:
        if x is None:
            return None
        if inner == dtype or (exact and (is_number(x) or (ranked and x.ndim == 0))):
            return cast(x, inner)
        return cast(cast(x, dtype), inner)

    return dtype, tuple(map(widen, operands))


def _factor(number: Any, dtype: Any) -> Any:
    """Rounds a factor to the dtype of the result; 1 is unchanged."""
    is_one = isinstance(number, int | float) and number == 1
    return 1 if is_one else cast(number, dtype).astype(wide(dtype))


@lowering("aten::add", elements=(0, 1), dims=pointwise)
def add(x: Any, y: Any, *, alpha: Any = 1) -> jax.Array:
    """Computes `x + alpha * y`; or, for bool, logical or."""
    dtype, (x, y) = in_opmath(x, y)
    if _is_bool(dtype):
        return x | (y & bool(alpha))
    return (x + _times(_factor(alpha, dtype), y)).astype(dtype)


@lowering("aten::sub", elements=(0, 1), dims=pointwise)
def sub(x: Any, y: Any, *, alpha: Any = 1) -> jax.Array:
    """Computes `x - alpha * y`."""
    dtype, (x, y) = in_opmath(x, y)
    return (x - _times(_factor(alpha, dtype), y)).astype(dtype)


@lowering("aten::rsub", whole=False, elements=(0, 1), dims=pointwise)
def rsub(x: Any, y: Any, alpha: Any = 1) -> jax.Array:
    """Computes `y - alpha * x`."""
    return sub(y, x, alpha=alpha)


def _times(number: Any, x: Any) -> Any:
    return x if isinstance(number, int | float) and number == 1 else cast(number, x.dtype) * x


@lowering("aten::mul", elements=(0, 1), dims=pointwise)
def mul(x: Any, y: Any) -> jax.Array:
    """Returns the product; for bool, logical and."""
    dtype, (x, y) = in_opmath(x, y, exact=True)
    return x & y if _is_bool(dtype) else (x * y).astype(dtype)


@lowering("aten::div", elements=(0, 1), dims=pointwise)
def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> jax.Array:
    """Returns the quotient; integers give floats unless it is rounded (`trunc` or `floor`)."""
    dtype, (x, y) = in_opmath(x, y, to_float=rounding_mode is None, exact=True)
    if rounding_mode is None:
        return (x / y).astype(dtype)
    x, y = jax.lax.stop_gradient(jnp.broadcast_arrays(x, y))
    if not is_floating(x):
        return jax.lax.div(x, y) if rounding_mode == "trunc" else jnp.floor_divide(x, y)
    return (jnp.trunc(x / y) if rounding_mode == "trunc" else _floor_of(x, y)).astype(dtype)


@lowering("aten::floor_divide", elements=(0, 1))
def floor_divide(x: Any, y: Any) -> jax.Array:
    """Returns the quotient rounded down."""
    return div(x, y, rounding_mode="floor")


def _floor_of(x: Any, y: Any) -> jax.Array:
    """Returns the quotient of floats rounded down, from the exact remainder as in Python."""
    rest = jax.lax.rem(x, y)
    quotient = (x - rest) / y
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    below = jnp.floor(quotient)
    whole = jnp.where(quotient - below > 0.5, below + 1, below)
    whole = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(x), x / y), whole)
    return jnp.where(y == 0, x / y, whole)


@lowering("aten::remainder", elements=(0, 1))
def remainder(x: Any, y: Any) -> jax.Array:
    """Returns the remainder of floor division, with the sign of the divisor."""
    dtype, (x, y) = in_opmath(x, y)
    x, y = jnp.broadcast_arrays(x, y)
    return (_rest_of_floats(x, y) if is_floating(x) else _rest_of(x, y)).astype(dtype)


def _rest_of(x: Any, y: Any) -> jax.Array:
    rest = jax.lax.rem(x, y)
    return jnp.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest)


@jax.custom_jvp
def _rest_of_floats(x: Any, y: Any) -> jax.Array:
    """Computes the remainder; its derivative by the divisor is minus the exact floored quotient.

    JAX's derivative uses the rounded quotient, which is off by one next to a whole number.
    """
    return _rest_of(x, y)


@_rest_of_floats.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    whole = jax.lax.stop_gradient(_floor_of(*primals))
    return _rest_of_floats(*primals), tangents[0] - whole * tangents[1]


@lowering("aten::fmod", elements=(0, 1))
def fmod(x: Any, y: Any) -> jax.Array:
    """Returns the remainder of truncated division, with the sign of the dividend."""
    dtype, (x, y) = in_opmath(x, y)
    return jax.lax.rem(*jnp.broadcast_arrays(x, y)).astype(dtype)


@lowering("aten::pow", elements=(0, 1), dims=pointwise)
def power(x: Any, y: Any) -> jax.Array:
    """Computes `x ** y`, with torch's special cases for exponents that are numbers."""
    dtype, (base, exponent) = in_opmath(x, y, exact=True)
    if not (is_floating(dtype) or is_complex(dtype)):
        is_int = isinstance(y, int) and not isinstance(y, bool)
        return jax.lax.integer_pow(base, y) if is_int and y >= 0 else _integer_power(base, exponent)
    if isinstance(y, int | float) and not isinstance(y, bool):
        return _known_power(base, y).astype(dtype)
    if is_complex(dtype):
        return _complex_power(base, exponent)
    # The gradient of 0 ** 0 is zero, as in torch; in JAX it is NaN.
    return jnp.power(jnp.where((base == 0) & (exponent == 0), 1, base), exponent).astype(dtype)


def _known_power(x: Any, y: float) -> jax.Array:
    if y == 0:
        return jnp.ones_like(x)
    if y in (1, 2, 3):
        return jax.lax.integer_pow(x, int(y))
    if y == -1:
        return 1 / x
    if y == -2:
        return jax.lax.integer_pow(x, -2)
    if y == 0.5:
        return jnp.sqrt(x)
    if y == -0.5:
        return 1 / jnp.sqrt(x)
    return (_complex_power if is_complex(x) else jnp.power)(x, cast(y, x.dtype))


def _complex_power(x: Any, y: Any) -> jax.Array:
    """Computes powers as torch does, also of zero and infinite numbers."""
    none = (x == 0) & (y.real > 0)
    return jnp.where(none, 0, jnp.exp(y * jnp.log(jnp.where(none, 1, x))))


def _integer_power(x: Any, y: Any) -> jax.Array:
    """Wraps around as in torch; negative exponents give zero unless x is 1 or -1."""
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


@lowering("aten::addcmul", dims=pointwise)
def addcmul(x: Any, y: Any, z: Any, *, value: Any = 1) -> jax.Array:
    """Computes `x + value * y * z`."""
    dtype, (x, y, z) = in_opmath(x, y, z, exact=True)
    return (x + _times(value, y) * z).astype(dtype)


@lowering("aten::addcdiv", dims=pointwise)
def addcdiv(x: Any, y: Any, z: Any, *, value: Any = 1) -> jax.Array:
    """Computes `x + value * y / z`."""
    dtype, (x, y, z) = in_opmath(x, y, z, exact=True)
    return (x + _times(value, y) / z).astype(dtype)


@lowering("aten::lerp", dims=pointwise)
def lerp(start: Any, end: Any, weight: Any) -> jax.Array:
    """Interpolates between start and end, computed from the nearer one."""
    dtype, (x, y, w) = in_opmath(start, end, weight, exact=True)
    near = jnp.abs(w) < 0.5
    return jnp.where(near, x + w * (y - x), y - (y - x) * (1 - w)).astype(dtype)
