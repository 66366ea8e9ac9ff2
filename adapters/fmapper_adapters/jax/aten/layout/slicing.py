"""Parts of arrays along one dimension, and arrays with such a part replaced."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.arrays.packed import separate
from fmapper_adapters.jax.aten.table import dimensions, lowering
from fmapper_adapters.jax.aten.types import cast


@lowering("aten::select", "aten::select_copy", int64="moves", dims=dimensions.part)
def select(x: Any, dim: int, index: Any) -> jax.Array:
    """Selects one index of a dimension, which is dropped; negative indices count from the end."""
    if isinstance(index, jax.Array):
        return jnp.take(x, wrap(index, x.shape[dim]), axis=dim)
    return jax.lax.index_in_dim(x, index, dim, keepdims=False)


@lowering("aten::slice", "aten::slice_copy", int64="moves", dims=dimensions.part)
def slice_(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> jax.Array:
    """Returns a slice as in Python, with a step of at least one."""
    start, end = bounds(x.shape[dim], start, end)
    return jax.lax.slice_in_dim(x, start, end, step, dim)


def bounds(size: Any, start: Any, end: Any) -> tuple[Any, Any]:
    """Returns the start and the end of a slice within a dimension, where sizes may be symbols."""
    start = _bound(size, 0 if start is None else start)
    end = size if end is None or _is_huge(end) else _bound(size, end)
    return start, jax.core.max_dim(start, end)


def _bound(size: Any, at: Any) -> Any:
    if isinstance(at, int) and at < 0:
        at = at + size
    return jax.core.max_dim(0, jax.core.min_dim(at, size))


def _is_huge(x: Any) -> bool:
    return isinstance(x, int) and x >= sys.maxsize


@lowering("aten::narrow", "aten::narrow_copy", int64="moves", dims=dimensions.part)
def narrow(x: Any, dim: int, start: Any, length: Any) -> jax.Array:
    """Returns `length` elements from `start` on."""
    if isinstance(start, int) and start < 0:
        start = start + x.shape[dim]
    if isinstance(start, jax.Array):
        start = wrap(start.reshape(()), x.shape[dim])
        return jax.lax.dynamic_slice_in_dim(x, start, length, dim)
    return jax.lax.slice_in_dim(x, start, start + length, 1, dim)


@lowering(
    "aten::split_with_sizes",
    "aten::split.sizes",
    "aten::split.default",
    int64="moves",
    dims=dimensions.split,
)
@lowering(
    "aten::split_with_sizes_copy", "aten::unsafe_split_with_sizes", whole=False, int64="moves"
)
def split_with_sizes(x: Any, split_sizes: Sequence[Any], dim: int = 0) -> tuple[jax.Array, ...]:
    """Splits into parts of the given sizes."""
    parts = []
    start: Any = 0
    for size in split_sizes:
        parts.append(jax.lax.slice_in_dim(x, start, start + size, 1, dim))
        start = start + size
    return tuple(parts)


@lowering("fmapper::take_apart", whole=False, int64="moves")
def take_apart(
    x: Any, dim: int, sizes: Sequence[int], count: int, chosen: Sequence[int]
) -> tuple[jax.Array, ...]:
    """Returns some of the arrays that are packed in one, of which each block has a part of each.

    Args:
        x: The array.
        dim: The dimension along which they are packed.
        sizes: Their sizes along it.
        count: The number of blocks.
        chosen: The indices of the arrays to return.
    """
    parts = separate(x, dim, sizes, count)
    return tuple([parts[at] for at in chosen])


@lowering("fmapper::take_part", whole=False, int64="moves")
def take_part(
    x: Any, dim: int, sizes: Sequence[int], count: int, chosen: Sequence[int]
) -> jax.Array:
    """Returns one of the arrays that are packed in one; see `take_apart`."""
    (part,) = take_apart(x, dim, sizes, count, chosen)
    return part


@lowering("aten::split_copy.Tensor", int64="moves")
@lowering(
    "aten::split.Tensor",
    "aten::unsafe_split.Tensor",
    whole=False,
    int64="moves",
    dims=dimensions.split,
)
def split(x: Any, split_size: Any, dim: int = 0) -> tuple[jax.Array, ...]:
    """Splits into parts of one size; the last one has the rest."""
    size = x.shape[dim]
    count = 1 if size == 0 else -(-size // split_size)
    sizes = [split_size] * (count - 1)
    return split_with_sizes(x, (*sizes, size - split_size * (count - 1)), dim)


@lowering("aten::chunk", "aten::unsafe_chunk", int64="moves", dims=dimensions.split)
def chunk(x: Any, chunks: int, dim: int = 0) -> tuple[jax.Array, ...]:
    """Splits into at most this number of parts of one size."""
    size = x.shape[dim]
    if size == 0:
        return (x,) * chunks
    return split(x, -(-size // chunks), dim)


@lowering("aten::tensor_split.sections")
def tensor_split_sections(x: Any, sections: int, dim: int = 0) -> tuple[jax.Array, ...]:
    """Splits into parts whose sizes differ by at most one, the larger ones first."""
    small, more = divmod(x.shape[dim], sections)
    return split_with_sizes(x, (small + 1,) * more + (small,) * (sections - more), dim)


@lowering("aten::unbind_copy", int64="moves")
@lowering("aten::unbind", whole=False, int64="moves")
def unbind(x: Any, dim: int = 0) -> tuple[jax.Array, ...]:
    """Returns all indices of a dimension."""
    return tuple(jax.lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim]))


@lowering("aten::select_scatter", int64="moves")
def select_scatter(x: Any, source: Any, dim: int, index: Any) -> jax.Array:
    """Returns the array with one index of a dimension replaced."""
    if isinstance(index, jax.Array):
        index = wrap(index, x.shape[dim])
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(cast(source, x.dtype))


@lowering("aten::slice_scatter", int64="moves")
def slice_scatter(
    x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> jax.Array:
    """Returns the array with a slice replaced."""
    source = cast(source, x.dtype)
    start, end = bounds(x.shape[dim], start, end)
    shape = list(x.shape)
    shape[dim] = jax.core.max_dim(0, (end - start + step - 1) // step)
    source = jnp.broadcast_to(source, tuple(shape))
    return x.at[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].set(source)


@lowering("aten::diagonal_scatter", int64="moves")
def diagonal_scatter(
    x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    """Returns the array with a diagonal replaced."""
    y = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    length = max(0, min(y.shape[-2] + min(offset, 0), y.shape[-1] - max(offset, 0)))
    at = jnp.arange(length)
    y = y.at[..., at + max(-offset, 0), at + max(offset, 0)].set(cast(source, x.dtype))
    return jnp.moveaxis(y, (-2, -1), (dim1, dim2))


def wrap(index: Any, size: Any) -> Any:
    """Returns indices where negative ones count from the end."""
    return jnp.where(index < 0, index + size, index)
