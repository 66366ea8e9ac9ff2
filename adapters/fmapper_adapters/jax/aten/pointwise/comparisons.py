"""Maxima and minima of two arrays, comparisons, logic and bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import lowering, pointwise
from fmapper_adapters.jax.aten.types import (
    is_complex,
    is_floating,
    is_integral,
    promote,
    saturate,
    within,
)


def is_nan(x: Any) -> Any:
    """Returns where elements are NaN; nowhere for integers."""
    return jnp.isnan(x) if is_inexact(x) else jnp.zeros(x.shape, bool)


def is_signed(dtype: Any) -> bool:
    """Returns whether an integer dtype has negative numbers."""
    return bool(jnp.issubdtype(dtype, jnp.signedinteger))


def is_inexact(x: Any) -> bool:
    """Returns whether elements are floats or complex numbers."""
    return is_floating(x) or is_complex(x)


# --- maxima and minima ----------------------------------------------------------------------


@lowering("aten::clamp", int64="moves", dims=pointwise)
def clamp(x: Any, min: Any = None, max: Any = None) -> jax.Array:
    """Clamps to bounds, the upper one first; NaN on any side stays; x at a bound has a gradient."""
    if is_integral(x):
        min, max = saturate(min), saturate(max)
    x, low, high = promote(x, min, max)
    if low is not None:
        x = jnp.where((x < low) | is_nan(low), low, x)
    if high is not None:
        x = jnp.where((x > high) | is_nan(high) & ~is_nan(x), high, x)
    return x


@lowering("aten::clamp_min", whole=False, int64="moves", dims=pointwise)
def clamp_min(x: Any, min: Any) -> jax.Array:
    """Clamps to a lower bound."""
    return clamp(x, min)


@lowering("aten::clamp_max", whole=False, int64="moves", dims=pointwise)
def clamp_max(x: Any, max: Any) -> jax.Array:
    """Clamps to an upper bound."""
    return clamp(x, None, max)


@lowering("aten::maximum", int64="moves", dims=pointwise)
@lowering("aten::max.other", whole=False, int64="moves", dims=pointwise)
def maximum(x: Any, y: Any) -> jax.Array:
    """Returns the larger element, or NaN if either is NaN."""
    return _maximum(*jnp.broadcast_arrays(*promote(x, y)))


@lowering("aten::minimum", int64="moves", dims=pointwise)
@lowering("aten::min.other", whole=False, int64="moves", dims=pointwise)
def minimum(x: Any, y: Any) -> jax.Array:
    """Returns the smaller element, or NaN if either is NaN."""
    return _minimum(*jnp.broadcast_arrays(*promote(x, y)))


@jax.custom_jvp
def _maximum(x: Any, y: Any) -> jax.Array:
    """Computes `jnp.maximum`; as in torch, the other operand gets no gradient, not even for NaN."""
    return jnp.maximum(x, y)


@jax.custom_jvp
def _minimum(x: Any, y: Any) -> jax.Array:
    return jnp.minimum(x, y)


def _share_slope(slope: Any, x: Any, y: Any, taken: Any) -> jax.Array:
    return jnp.where(x == y, slope / 2, jnp.where(taken, slope, 0))


_maximum.defjvps(
    lambda slope, value, x, y: _share_slope(slope, x, y, ~(x < y)),
    lambda slope, value, x, y: _share_slope(slope, y, x, ~(y < x)),
)
_minimum.defjvps(
    lambda slope, value, x, y: _share_slope(slope, x, y, ~(x > y)),
    lambda slope, value, x, y: _share_slope(slope, y, x, ~(y > x)),
)


@lowering("aten::fmax", dims=pointwise)
def fmax(x: Any, y: Any) -> jax.Array:
    """Returns the larger element, or the one that is not NaN."""
    x, y = promote(x, y)
    return jnp.where((x >= y) | is_nan(y), x, y)


@lowering("aten::fmin", dims=pointwise)
def fmin(x: Any, y: Any) -> jax.Array:
    """Returns the smaller element, or the one that is not NaN."""
    x, y = promote(x, y)
    return jnp.where((x <= y) | is_nan(y), x, y)


# --- comparison and logic -------------------------------------------------------------------


def _binary(function: Callable[..., Any], *ops: str) -> None:
    lowering(*ops, elements=(0, 1), dims=pointwise)(lambda x, y: function(*promote(x, y)))


def _comparison(function: Callable[..., Any], *ops: str) -> None:
    """Registers a comparison; numbers beyond the range of integers count as infinite."""
    lowering(*ops, int64="looks", dims=pointwise)(
        lambda x, y: function(*promote(within(x, y), within(y, x)))
    )


_comparison(jnp.equal, "aten::eq")
_comparison(jnp.not_equal, "aten::ne")
_comparison(jnp.less, "aten::lt")
_comparison(jnp.less_equal, "aten::le")
_comparison(jnp.greater, "aten::gt")
_comparison(jnp.greater_equal, "aten::ge")
_binary(jnp.bitwise_and, "aten::bitwise_and")
_binary(jnp.bitwise_or, "aten::bitwise_or")
_binary(jnp.bitwise_xor, "aten::bitwise_xor")
lowering("aten::logical_and", int64="looks", dims=pointwise)(jnp.logical_and)
lowering("aten::logical_or", int64="looks", dims=pointwise)(jnp.logical_or)
lowering("aten::logical_xor", int64="looks", dims=pointwise)(jnp.logical_xor)
lowering("aten::logical_not", int64="looks", dims=pointwise)(jnp.logical_not)
lowering("aten::bitwise_not", dims=pointwise)(jnp.invert)
lowering("aten::isnan", int64="looks")(is_nan)
lowering("aten::isinf", int64="looks")(
    lambda x: jnp.isinf(x) if is_inexact(x) else jnp.zeros(x.shape, bool)
)
lowering("aten::isfinite", int64="looks")(
    lambda x: jnp.isfinite(x) if is_inexact(x) else jnp.ones(x.shape, bool)
)
lowering("aten::isposinf", dims=pointwise)(
    lambda x: x == jnp.inf if is_inexact(x) else jnp.zeros(x.shape, bool)
)
lowering("aten::isneginf", dims=pointwise)(
    lambda x: x == -jnp.inf if is_inexact(x) else jnp.zeros(x.shape, bool)
)
lowering("aten::isreal", whole=False)(
    lambda x: x.imag == 0 if is_complex(x) else jnp.ones(x.shape, bool)
)


@lowering("aten::signbit", dims=pointwise)
def signbit(x: Any) -> jax.Array:
    """Returns whether the sign is negative, also that of zero and NaN."""
    if x.dtype == bool:
        return jnp.zeros(x.shape, bool)
    return jnp.signbit(x) if is_floating(x) else x < 0


@lowering("aten::bitwise_left_shift", "aten::__lshift__")
def left_shift(x: Any, y: Any) -> jax.Array:
    """Shifts bits left; a shift that is negative or too wide gives zero."""
    x, y = promote(x, y)
    if is_floating(x):
        return x * jnp.power(jnp.asarray(2, x.dtype), y)
    inside = (y >= 0) & (y < 8 * x.dtype.itemsize)
    return jnp.where(inside, jnp.left_shift(x, jnp.where(inside, y, 0)), 0)


@lowering("aten::bitwise_right_shift", "aten::__rshift__")
def right_shift(x: Any, y: Any) -> jax.Array:
    """Shifts bits right, keeping the sign; a negative or too wide shift leaves only the sign."""
    x, y = promote(x, y)
    if is_floating(x):
        return x / jnp.power(jnp.asarray(2, x.dtype), y)
    bits = 8 * x.dtype.itemsize
    inside = (y >= 0) & (y < bits)
    left = jnp.right_shift(x, jnp.asarray(bits - 1, x.dtype)) if is_signed(x.dtype) else 0
    return jnp.where(inside, jnp.right_shift(x, jnp.where(inside, y, 0)), left).astype(x.dtype)


@lowering("aten::where.self", int64="moves", elements=(1, 2), dims=pointwise)
@lowering(
    "aten::where.ScalarOther",
    "aten::where.ScalarSelf",
    "aten::where.Scalar",
    whole=False,
    int64="moves",
    elements=(1, 2),
    dims=pointwise,
)
def where(condition: Any, x: Any, y: Any) -> jax.Array:
    """Returns x where the condition holds, else y."""
    x, y = promote(x, y)
    return jnp.where(condition.astype(bool), x, y)
