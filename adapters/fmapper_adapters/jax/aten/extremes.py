"""The largest and the smallest elements.

The gradient of `jnp.max` and of `jax.lax.reduce_max` looks for the elements that are equal to the
largest one. XLA may compute these once more to compare them, and round otherwise (jaxlib 0.10.2 on
a CPU does, after a batch norm and a ReLU): then none is equal, and the gradient is zero. Elements
that are picked by their index have no such gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import lowering, reduces
from fmapper_adapters.jax.aten.types import dtype_of


def axes(x: Any, dim: Any) -> tuple[int, ...]:
    """Returns the dimensions that a reduction goes over; none or an empty list means all."""
    if dim is None or dim == ():
        return tuple(range(x.ndim))
    dims = dim if isinstance(dim, tuple) else (dim,)
    return tuple(d % x.ndim for d in dims) if x.ndim else ()


def largest(x: Any, dims: Any = None, keepdims: bool = False) -> jax.Array:
    """Returns the largest elements over dimensions, which share their gradient, as in torch."""
    return _extreme(jnp.max, jnp.argmax, x, dims, keepdims)


def smallest(x: Any, dims: Any = None, keepdims: bool = False) -> jax.Array:
    """Returns the smallest elements over dimensions, which share their gradient, as in torch."""
    return _extreme(jnp.min, jnp.argmin, x, dims, keepdims)


def _extreme(
    reduce: Callable[..., Any], place: Callable[..., Any], x: Any, dims: Any, keepdims: bool
) -> jax.Array:
    over = axes(x, dims)
    if not over or not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, over, keepdims=keepdims)
    reduced: Callable[..., Any] = jax.custom_jvp(lambda x: reduce(x, over, keepdims=keepdims))

    @reduced.defjvp  # type: ignore[attr-defined, untyped-decorator]
    def differentiate(given: tuple[Any], slopes: tuple[Any]) -> tuple[Any, Any]:
        (x,), (slope,) = given, slopes
        last = tuple(range(-len(over), 0))
        moved = jnp.moveaxis(x, over, last)
        rows = moved.reshape(*moved.shape[: x.ndim - len(over)], -1)
        first = place(rows, -1, keepdims=True)
        is_first = jax.lax.broadcasted_iota(first.dtype, rows.shape, rows.ndim - 1) == first
        is_one = (rows == reduce(rows, -1, keepdims=True)) | is_first
        is_one = jnp.moveaxis(is_one.reshape(moved.shape), last, over)
        shared = jnp.where(is_one, slope, 0).sum(over, keepdims=keepdims)
        count = is_one.sum(over, keepdims=keepdims).astype(x.dtype)
        return reduced(x), shared / count

    result: jax.Array = reduced(x)
    return result


lowering("aten::amax", "aten::max.default", int64="moves", dims=reduces("dim", 1))(
    lambda x, dim=None, keepdim=False: largest(x, dim, keepdim)
)
lowering("aten::amin", "aten::min.default", int64="moves", dims=reduces("dim", 1))(
    lambda x, dim=None, keepdim=False: smallest(x, dim, keepdim)
)


@lowering("aten::argmax", int64="looks", dims=reduces("dim", 1))
def argmax(x: Any, dim: Any = None, keepdim: bool = False) -> jax.Array:
    """Returns the index of the first largest element; NaN is larger than all others."""
    return _place(jnp.argmax, x, dim, keepdim)


@lowering("aten::argmin", int64="looks", dims=reduces("dim", 1))
def argmin(x: Any, dim: Any = None, keepdim: bool = False) -> jax.Array:
    """Returns the index of the first smallest element; NaN is smaller than all others."""
    return _place(jnp.argmin, x, dim, keepdim)


def _place(function: Callable[..., Any], x: Any, dim: Any, keepdim: bool) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((), dtype_of("int64"))
    return function(x, dim, keepdims=keepdim).astype(dtype_of("int64"))


def elements_at(x: Any, index: Any, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the elements at an index with a dimension of size one, and the index."""
    if x.ndim == 0:
        return x, index.reshape(())
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(index, dim))


@lowering("aten::max.dim", int64="picks", dims=reduces("dim", 1))
def max_dim(x: Any, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the largest elements along a dimension and their first indices."""
    return elements_at(x, argmax(x, dim, True), dim, keepdim)


@lowering("aten::min.dim", int64="picks", dims=reduces("dim", 1))
def min_dim(x: Any, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the smallest elements along a dimension and their first indices."""
    return elements_at(x, argmin(x, dim, True), dim, keepdim)


@lowering("aten::aminmax", int64="moves")
def aminmax(x: Any, *, dim: Any = None, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the smallest and the largest elements."""
    return smallest(x, dim, keepdim), largest(x, dim, keepdim)
