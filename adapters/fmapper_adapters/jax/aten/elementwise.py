"""Elementwise arithmetic, comparison and activation functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import cast, is_complex, is_floating, promote, wide


@lowering("aten::add")
def add(x: Any, y: Any, *, alpha: Any = 1) -> jax.Array:
    """`x + alpha * y`; or, for bool, logical or."""
    x, y = promote(x, y)
    if x.dtype == bool:
        return x | (y & bool(alpha))
    return x + y if alpha == 1 else x + cast(alpha, x.dtype) * y


@lowering("aten::sub")
def sub(x: Any, y: Any, *, alpha: Any = 1) -> jax.Array:
    """`x - alpha * y`."""
    x, y = promote(x, y)
    return x - y if alpha == 1 else x - cast(alpha, x.dtype) * y


@lowering("aten::rsub")
def rsub(x: Any, y: Any, alpha: Any = 1) -> jax.Array:
    """`y - alpha * x`."""
    x, y = promote(x, y)
    return y - x if alpha == 1 else y - cast(alpha, x.dtype) * x


@lowering("aten::mul")
def mul(x: Any, y: Any) -> jax.Array:
    """The product; for bool, logical and."""
    x, y = promote(x, y)
    return x & y if x.dtype == bool else x * y


def _unary(function: Callable[..., Any], *ops: str, to_float: bool = False) -> None:
    """Enters a function of one array; halves are computed in float32 and rounded once."""

    def lowered(x: Any) -> jax.Array:
        (x,) = promote(x, to_float=to_float)
        if is_floating(x) and wide(x.dtype) != x.dtype:
            return function(x.astype(wide(x.dtype))).astype(x.dtype)
        return function(x)

    lowering(*ops)(lowered)


_unary(jnp.negative, "aten::neg")
_unary(jnp.exp, "aten::exp", to_float=True)
_unary(jnp.sin, "aten::sin", to_float=True)
_unary(jnp.cos, "aten::cos", to_float=True)
_unary(jnp.tanh, "aten::tanh", to_float=True)
_unary(jax.nn.sigmoid, "aten::sigmoid", to_float=True)
_unary(jax.lax.rsqrt, "aten::rsqrt", to_float=True)


@lowering("aten::relu")
def relu(x: Any) -> jax.Array:
    """The larger of x and zero; NaN stays."""
    return jnp.maximum(x, jnp.zeros((), x.dtype))


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


@lowering("aten::pow")
def power(x: Any, y: Any) -> jax.Array:
    """`x ** y`."""
    if isinstance(y, int | float) and not isinstance(y, bool) and y == 2:
        (x, _) = promote(x, y)
        return x * x
    x, y = promote(x, y)
    if is_floating(x) or is_complex(x):
        return jnp.power(x, y)
    return jax.lax.integer_pow(x, int(y)) if y.ndim == 0 and _known(y) else jnp.power(x, y)


def _known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def _comparison(function: Callable[..., Any], *ops: str) -> None:
    lowering(*ops)(lambda x, y: function(*promote(x, y)))


_comparison(jnp.equal, "aten::eq")
_comparison(jnp.not_equal, "aten::ne")
_comparison(jnp.less, "aten::lt")
_comparison(jnp.less_equal, "aten::le")
_comparison(jnp.greater, "aten::gt")
_comparison(jnp.greater_equal, "aten::ge")


@lowering("aten::div")
def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> jax.Array:
    """The quotient; integers give floats unless it is rounded (`trunc` or `floor`)."""
    x, y = promote(x, y, to_float=rounding_mode is None)
    if rounding_mode is None:
        return x / y
    if is_floating(x):
        return jnp.trunc(x / y) if rounding_mode == "trunc" else jnp.floor_divide(x, y)
    return jax.lax.div(*jnp.broadcast_arrays(x, y)) if rounding_mode == "trunc" else x // y


@lowering("aten::where")
def where(condition: Any, x: Any, y: Any) -> jax.Array:
    """X where the condition holds, else y."""
    x, y = promote(x, y)
    return jnp.where(condition, x, y)


@lowering("aten::_to_copy", "aten::to")
def to_copy(x: Any, *, dtype: Any = None) -> jax.Array:
    """The array as another dtype."""
    return x if dtype is None else cast(x, dtype)


@lowering("aten::clone", "aten::alias", "aten::detach", "aten::contiguous", "aten::lift_fresh_copy")
def clone(x: Any) -> jax.Array:
    """The array itself: there are no views here."""
    return x


@lowering("aten::bitwise_and")
def bitwise_and(x: Any, y: Any) -> jax.Array:
    """Bitwise and."""
    return jnp.bitwise_and(*promote(x, y))


@lowering("aten::logical_not")
def logical_not(x: Any) -> jax.Array:
    """Whether elements are zero."""
    return jnp.logical_not(x)
