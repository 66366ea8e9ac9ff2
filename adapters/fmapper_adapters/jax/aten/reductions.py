"""Sums, means and other reductions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import cast, dtype_of, is_floating, wide


def axes(x: Any, dim: Any) -> tuple[int, ...]:
    """The dimensions that a reduction goes over; none or an empty list means all."""
    if dim is None or dim == ():
        return tuple(range(x.ndim))
    dims = dim if isinstance(dim, tuple) else (dim,)
    return tuple(d % x.ndim for d in dims) if x.ndim else ()


@lowering("aten::sum")
def total(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """The sum; integers and bool give int64, halves are added in float32."""
    if dtype is None:
        integral = not jnp.issubdtype(x.dtype, jnp.inexact)
        dtype = dtype_of("int64") if integral else x.dtype
    x = cast(x, dtype)
    return jnp.sum(x.astype(wide(dtype)), axes(x, dim), keepdims=keepdim).astype(dtype)


@lowering("aten::mean")
def mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """The mean, halves in float32."""
    dtype = x.dtype if dtype is None else dtype
    x = cast(x, dtype)
    return jnp.mean(x.astype(wide(dtype)), axes(x, dim), keepdims=keepdim).astype(dtype)


@lowering("aten::softmax", "aten::_softmax")
def softmax(x: Any, dim: int, half_to_float: Any = False, *, dtype: Any = None) -> jax.Array:
    """Softmax; rows of -inf give NaN, as in torch. Halves in float32."""
    # the third argument of aten::softmax.int is the dtype, of aten::_softmax a flag
    if dtype is None and half_to_float is not None and not isinstance(half_to_float, bool):
        dtype = half_to_float
    x = x if dtype is None else cast(x, dtype)
    result = jnp.dtype("float32") if half_to_float is True else x.dtype
    y = x.astype(wide(x.dtype)) if is_floating(x) else x
    top = jax.lax.stop_gradient(jnp.max(y, dim, keepdims=True, initial=-jnp.inf))
    unnormalised = jnp.exp(y - top)
    return (unnormalised / jnp.sum(unnormalised, dim, keepdims=True)).astype(result)
