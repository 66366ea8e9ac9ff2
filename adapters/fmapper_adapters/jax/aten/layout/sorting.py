"""Sorting, the largest elements, unique elements and binary search."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.pointwise.comparisons import is_nan
from fmapper_adapters.jax.aten.table import along, dimensions, lowering
from fmapper_adapters.jax.aten.types import dtype_of, is_complex, is_floating, promote

Pair = tuple[jax.Array, jax.Array]


def order_of(x: Any, dim: int, *, descending: bool) -> jax.Array:
    """Returns indices that sort a dimension, equal elements in order; NaN is the largest."""
    x = jax.lax.stop_gradient(x)
    if x.dtype == np.dtype(bool):
        x = x.astype(np.uint8)
    index = jax.lax.broadcasted_iota(dtype_of("int64"), x.shape, dim)
    if not descending:
        return jax.lax.sort((x, index), dimension=dim, num_keys=1)[1]
    if not is_floating(x):
        # the complement turns the order of integers round, the smallest one included
        return jax.lax.sort((~x, index), dimension=dim, num_keys=1)[1]
    # NaN first: sorting by the opposite sign puts it last
    keys = (~is_nan(x), -x)
    return jax.lax.sort((*keys, index), dimension=dim, num_keys=2)[2]


def _take(x: Any, order: Any, dim: int) -> Pair:
    return jnp.take_along_axis(x, order, dim), order


def _alone(x: Any) -> Pair:
    """Returns the result for an array without dimensions, which is sorted already."""
    return x, jnp.zeros((), dtype_of("int64"))


@lowering("aten::sort.default", int64="picks", dims=along("dim", 1))
def sort(x: Any, dim: int = -1, descending: bool = False) -> Pair:
    """Returns the sorted elements and their indices."""
    return stable_sort(x, stable=True, dim=dim, descending=descending)


@lowering("aten::sort.stable", int64="picks", dims=along("dim"))
def stable_sort(
    x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Pair:
    """Returns the sorted elements and their indices; equal ones keep their order."""
    if x.ndim == 0:
        return _alone(x)
    return _take(x, order_of(x, dim % x.ndim, descending=descending), dim % x.ndim)


@lowering("aten::argsort.default", whole=False, int64="looks", dims=along("dim", 1))
def argsort(x: Any, dim: int = -1, descending: bool = False) -> jax.Array:
    """Returns the indices that sort a dimension."""
    return sort(x, dim, descending)[1]


@lowering("aten::argsort.stable", whole=False, int64="looks", dims=along("dim"))
def stable_argsort(x: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> jax.Array:
    """Returns the indices that sort a dimension."""
    return sort(x, dim, descending)[1]


@lowering("aten::msort", whole=False)
def msort(x: Any) -> jax.Array:
    """Sorts along the first dimension."""
    return sort(x, 0)[0]


@lowering("aten::topk", int64="picks", dims=along("dim", 2))
def topk(x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Pair:
    """Returns the k largest or smallest elements in order, and their indices."""
    if x.ndim == 0:
        return _alone(x)
    dim %= x.ndim
    order = order_of(x, dim, descending=largest)
    return _take(x, jax.lax.slice_in_dim(order, 0, k, axis=dim), dim)


@lowering("aten::kthvalue", int64="picks")
def kthvalue(x: Any, k: Any, dim: int = -1, keepdim: bool = False) -> Pair:
    """Returns the kth smallest element, counted from one, and its index."""
    if x.ndim == 0:
        return _alone(x)
    dim %= x.ndim
    order = order_of(x, dim, descending=False)
    values, index = _take(x, jax.lax.slice_in_dim(order, k - 1, k, axis=dim), dim)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


# --- unique elements, whose number is known when the program runs ------------------------------


@lowering("aten::_unique2", "aten::_unique", data_dependent_shape=True)
def unique2(
    x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each element once, in order; NaNs are all different."""
    result = np.unique(np.asarray(x), return_inverse=True, return_counts=True, equal_nan=False)
    values, inverse, counts = result
    return _unique(values, inverse.reshape(x.shape), counts, return_inverse, return_counts)


@lowering("fmapper::unique_consecutive.static")
def runs(
    x: Any,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
    *,
    size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each run of equal elements of a row once, if the number of runs is known."""
    new = jnp.concatenate([jnp.ones(1, bool), x[1:] != x[:-1]])
    starts = jnp.nonzero(new, size=size, fill_value=0)[0]
    counts = jnp.append(starts[1:], x.shape[0]) - starts
    return _unique(x[starts], jnp.cumsum(new) - 1, counts, return_inverse, return_counts)


@lowering("fmapper::unique.static")
def unique_static(
    x: Any,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    *,
    size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each distinct element once, in order, if their number is known."""
    flat = x.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    values, inverse, counts = runs(flat[order], True, True, size=size)
    inverse = jnp.zeros_like(inverse).at[order].set(inverse).reshape(x.shape)
    return _unique(values, inverse, counts, return_inverse, return_counts)


@lowering("aten::unique_dim", data_dependent_shape=True)
def unique_dim(
    x: Any,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each slice along a dimension once, in the order of their elements."""
    values, inverse, counts = np.unique(
        np.asarray(x), axis=dim, return_inverse=True, return_counts=True, equal_nan=False
    )
    return _unique(values, inverse.reshape(-1), counts, return_inverse, return_counts)


@lowering("aten::unique_consecutive", data_dependent_shape=True)
def unique_consecutive(
    x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each run of equal elements, or of equal slices along a dimension, once."""
    array = np.asarray(x)
    rows = array.reshape(-1) if dim is None else np.moveaxis(array, dim, 0)
    flat = rows.reshape(rows.shape[0], -1) if rows.size else rows.reshape(rows.shape[0], 0)
    new = np.ones(rows.shape[0], bool)
    new[1:] = (flat[1:] != flat[:-1]).any(1)
    starts = np.flatnonzero(new)
    values = rows[starts] if dim is None else np.moveaxis(rows[starts], 0, dim)
    inverse = np.cumsum(new) - 1
    if dim is None:
        inverse = inverse.reshape(array.shape)
    counts = np.diff(np.append(starts, rows.shape[0]))
    return _unique(values, inverse, counts, return_inverse, return_counts)


def _unique(
    values: Any, inverse: Any, counts: Any, return_inverse: bool, return_counts: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    nothing = jnp.zeros((0,), dtype_of("int64"))
    return (
        jnp.asarray(values),
        jnp.asarray(inverse, dtype_of("int64")) if return_inverse else nothing,
        jnp.asarray(counts, dtype_of("int64")) if return_counts else nothing,
    )


# --- search -------------------------------------------------------------------------------------


@lowering("aten::searchsorted", int64="looks")
def searchsorted(
    edges: Any,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> jax.Array:
    """Returns where elements belong in sorted rows: before equal ones, or with `right` after."""
    if sorter is not None:
        edges = jnp.take_along_axis(edges, sorter, -1)
    edges, x = jax.lax.stop_gradient(promote(edges, jnp.asarray(x)))
    behind = right or side == "right"
    if x.size == 0:
        places = jnp.zeros(x.shape, np.int32)
    elif edges.ndim == 1:
        places = _places(edges, x.reshape(-1), behind).reshape(x.shape)
    else:
        rows = edges.reshape(-1, edges.shape[-1])
        places = jax.vmap(lambda e, y: _places(e, y, behind))(rows, x.reshape(rows.shape[0], -1))
        places = places.reshape(x.shape)
    return places.astype(np.int32 if out_int32 else dtype_of("int64"))


def _places(edges: Any, x: Any, behind: bool) -> jax.Array:
    """Searches by bisection; NaN sorts last."""
    low = jnp.zeros(x.shape, np.int32)
    high = jnp.full(x.shape, edges.shape[0], np.int32)
    if edges.shape[0] == 0:
        return low

    def step(_: Any, bounds: Any) -> Any:
        low, high = bounds
        middle = (low + high) // 2
        edge = edges[jnp.minimum(middle, edges.shape[0] - 1)]
        before = ~(edge > x) if behind else ~(edge >= x)
        going = low < high
        return jnp.where(going & before, middle + 1, low), jnp.where(going & ~before, middle, high)

    count = edges.shape[0]
    rounds = count.bit_length() if isinstance(count, int) else 32
    return jax.lax.fori_loop(0, rounds, step, (low, high))[0]


@lowering("aten::bucketize", int64="looks", dims=dimensions.bucketize)
def bucketize(
    x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    """Returns where elements belong between boundaries."""
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


@lowering("aten::isin", int64="looks")
def isin(
    elements: Any, among: Any, *, assume_unique: bool = False, invert: bool = False
) -> jax.Array:
    """Returns which elements are among others; NaN never is."""
    elements, among = promote(jnp.asarray(elements), jnp.asarray(among))
    among = among.reshape(-1)
    if among.size <= 16 or is_complex(elements):
        result = (elements[..., None] == among).any(-1)
    else:
        ordered = jnp.sort(among)
        place = _places(ordered, elements.reshape(-1), False).reshape(elements.shape)
        result = ordered[jnp.minimum(place, among.size - 1)] == elements
    return ~result if invert else result
