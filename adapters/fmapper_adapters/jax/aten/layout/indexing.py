"""Lookup and assignment by index arrays and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fmapper.programs import Call
from fmapper_adapters.jax.aten.table import dimensions, lowering, pointwise
from fmapper_adapters.jax.aten.types import cast, dtype_of, is_floating


@lowering("aten::index", int64="moves", dims=dimensions.index)
@lowering("aten::_unsafe_index", whole=False, int64="moves")
def index(x: Any, indices: Sequence[Any]) -> jax.Array:
    """Computes `x[indices]`; None is a whole dimension, and a mask selects its true elements."""
    # NaN for indices out of range
    return x.at[_positions(indices)].get(mode="fill")


def _moves_or_adds(call: Call) -> Literal["computes", "moves"]:
    """Returns the effect of `index_put` on elements; `accumulate` is its fourth argument."""
    return "computes" if call.kwargs.get("accumulate", any(call.args[3:4])) else "moves"


@lowering("aten::index_put", int64=_moves_or_adds)
@lowering("aten::_unsafe_index_put", whole=False, int64=_moves_or_adds)
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> jax.Array:
    """Replaces elements or, with `accumulate`, adds to them; indices may repeat."""
    values = cast(values, x.dtype)
    if sum(i is not None for i in indices) == 1:
        front, mask = next((n, i) for n, i in enumerate(indices) if i is not None)
        if _is_mask(mask):
            return _put_where(x, mask, values, front, accumulate)
    at = x.at[_positions(indices)]
    if not accumulate:
        return at.set(values)
    return at.max(values) if x.dtype == bool else at.add(values)


@lowering("aten::_unsafe_masked_index", whole=False)
def masked_index(x: Any, mask: Any, indices: Sequence[Any], fill: Any) -> jax.Array:
    """Computes `x[indices]` where the mask holds, else a number."""
    at = tuple(
        slice(None) if i is None else jnp.clip(i, 0, x.shape[d] - 1) for d, i in enumerate(indices)
    )
    return jnp.where(mask, x[at], cast(fill, x.dtype))


@lowering("aten::_unsafe_masked_index_put_accumulate", whole=False)
def masked_index_put_accumulate(
    x: Any, mask: Any, indices: Sequence[Any], values: Any
) -> jax.Array:
    """Returns the array with values added at indices where the mask holds."""
    at = tuple(
        slice(None) if i is None else jnp.clip(i, 0, x.shape[d] - 1) for d, i in enumerate(indices)
    )
    target, values = x.at[at], jnp.where(mask, values, jnp.zeros((), x.dtype))
    return target.max(values) if x.dtype == bool else target.add(values)


def _is_mask(i: Any) -> bool:
    return i is not None and i.dtype in (np.dtype(bool), np.dtype("uint8"))


def _positions(indices: Sequence[Any]) -> tuple[Any, ...]:
    """Converts indices for JAX; masks become the indices of their true elements."""
    positions: list[Any] = []
    for i in indices:
        if i is None:
            positions.append(slice(None))
        elif _is_mask(i):
            positions.extend(jnp.asarray(p) for p in np.nonzero(np.asarray(i)))
        else:
            positions.append(i)
    return tuple(positions)


def _put_where(x: Any, mask: Any, values: Any, front: int, accumulate: bool) -> jax.Array:
    """Assigns under one mask, without knowing how many of its elements are true."""
    mask = mask.astype(bool)
    behind = x.ndim - front - mask.ndim
    whole = mask.reshape(*mask.shape, *(1,) * behind)
    # values are broadcast to (front..., true elements, behind...)
    values = values.reshape((1,) * (front + 1 + behind - values.ndim) + values.shape)
    if isinstance(values.shape[front], int) and values.shape[front] == 1:
        each = values.reshape(*values.shape[:front], *(1,) * mask.ndim, *values.shape[front + 1 :])
    elif isinstance(values.shape[front], int) and values.shape[front] == 0:
        return x  # one per true element
    else:
        order = jnp.cumsum(mask.reshape(-1).astype("int32")) - 1
        each = jnp.take(values, jnp.maximum(order, 0), axis=front)
        each = each.reshape(*values.shape[:front], *mask.shape, *values.shape[front + 1 :])
    if not accumulate:
        return jnp.where(whole, each, x)
    added = jnp.where(whole, each, jnp.zeros((), x.dtype))
    return x | added if x.dtype == bool else x + added


@lowering("aten::index_select", int64="moves", dims=dimensions.gather)
def index_select(x: Any, dim: int, index: Any) -> jax.Array:
    """Selects the given indices of one dimension."""
    if x.ndim == 0:
        return x if index.ndim == 0 else jnp.broadcast_to(x, index.shape).reshape(())
    return jnp.take(x, index.reshape(-1), axis=dim)


@lowering("aten::take", int64="moves")
def take(x: Any, index: Any) -> jax.Array:
    """Returns elements of the flattened array."""
    if x.size == 0:  # jnp.take returns it unchanged
        return jnp.zeros(index.shape, x.dtype)
    return jnp.take(x.reshape(-1), index)


@lowering("aten::put")
def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> jax.Array:
    """Returns the array with elements, by flat index, replaced or added to."""
    flat = x.reshape(-1)
    at = flat.at[index.reshape(-1)]
    source = cast(source.reshape(-1), x.dtype)
    if not accumulate:
        return at.set(source).reshape(x.shape)
    return (at.max(source) if x.dtype == bool else at.add(source)).reshape(x.shape)


@lowering("aten::index_add")
def index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> jax.Array:
    """Returns the array with slices added at indices of a dimension, which may repeat."""
    source = cast(source, x.dtype)
    if not (isinstance(alpha, int | float) and alpha == 1):
        source = source * cast(alpha, x.dtype) if x.dtype != bool else source & bool(alpha)
    at, source = _at(x, dim, index, source)
    return (at.max(source) if x.dtype == bool else at.add(source)).reshape(x.shape)


@lowering("aten::index_copy", int64="moves")
def index_copy(x: Any, dim: int, index: Any, source: Any) -> jax.Array:
    """Returns the array with slices replaced at indices of a dimension."""
    if index.size == 1 and x.ndim and source.ndim == x.ndim:  # XLA writes it in place
        start = [0] * x.ndim
        start[dim] = index.reshape(())
        source = cast(source, x.dtype)
        if x.ndim > 2 and x.shape[0] == 1 and dim % x.ndim:
            # XLA drops dimensions of one row from products, and would write the array a second
            # time.
            result = jax.lax.dynamic_update_slice(x[0], source[0], start[1:])
            return result.reshape(x.shape)
        return jax.lax.dynamic_update_slice(x, source, start)
    at, source = _at(x, dim, index, cast(source, x.dtype))
    return at.set(source).reshape(x.shape)


@lowering("aten::index_fill", int64="moves", elements=(3,))
def index_fill(x: Any, dim: int, index: Any, value: Any) -> jax.Array:
    """Returns the array with one number at indices of a dimension."""
    at, _ = _at(x, dim, index, jnp.zeros(()))
    return at.set(cast(value, x.dtype)).reshape(x.shape)


def _at(x: Any, dim: int, index: Any, source: Any) -> tuple[Any, Any]:
    """Returns the places of slices, and the slices; scalars count as having one dimension."""
    if x.ndim == 0:
        return x.reshape(1).at[index.reshape(-1)], source.reshape(-1)
    dim = dim % x.ndim
    where = (slice(None),) * dim + (index.reshape(-1),)
    if index.ndim == 0 and source.ndim == x.ndim - 1:
        source = jnp.expand_dims(source, dim)
    return x.at[where], source


@lowering("aten::masked_fill", int64="moves", elements=(2,), dims=pointwise)
def masked_fill(x: Any, mask: Any, value: Any) -> jax.Array:
    """Returns the array with a number where the mask holds, in the array's dtype.

    The lowest float32, which models use in masks, becomes the lowest number of 16 bits when the
    model is cast: minus infinity would leave rows of NaN.
    """
    if isinstance(value, float) and math.isfinite(value) and is_floating(x.dtype):
        limits = jnp.finfo(x.dtype)
        value = min(max(value, float(limits.min)), float(limits.max))
    return jnp.where(mask, cast(value, x.dtype), x)


@lowering("aten::masked_scatter", int64="moves")
def masked_scatter(x: Any, mask: Any, source: Any) -> jax.Array:
    """Returns the array with the next element of the source wherever the mask holds."""
    x, mask = jnp.broadcast_arrays(x, mask.astype(bool))
    if source.size == 0:
        return x
    order = jnp.cumsum(mask.reshape(-1).astype("int32")) - 1
    taken = jnp.take(cast(source, x.dtype).reshape(-1), jnp.maximum(order, 0))
    return jnp.where(mask, taken.reshape(x.shape), x)


@lowering("aten::masked_select", data_dependent_shape=True, int64="moves")
def masked_select(x: Any, mask: Any) -> jax.Array:
    """Returns the elements where the mask holds, as one row."""
    x, mask = jnp.broadcast_arrays(x, mask.astype(bool))
    return jnp.take(x.reshape(-1), jnp.asarray(np.flatnonzero(np.asarray(mask))))


@lowering("aten::nonzero", data_dependent_shape=True, int64="looks")
@lowering("aten::argwhere", data_dependent_shape=True, whole=False)
def nonzero(x: Any) -> jax.Array:
    """Returns the indices of elements that are not zero, one row for each."""
    return jnp.asarray(np.argwhere(np.asarray(x)), dtype_of("int64"))


@lowering("aten::nonzero_numpy", data_dependent_shape=True, whole=False)
def nonzero_numpy(x: Any) -> tuple[jax.Array, ...]:
    """Returns the indices of elements that are not zero, one array per dimension."""
    return tuple(
        jnp.asarray(i, dtype_of("int64")) for i in np.nonzero(np.atleast_1d(np.asarray(x)))
    )


@lowering("aten::nonzero_static")
def nonzero_static(x: Any, *, size: int, fill_value: int = -1) -> jax.Array:
    """Returns the first indices of nonzero elements, filled up to a given number of rows."""
    if x.ndim == 0:
        return jnp.zeros((size, 0), dtype_of("int64"))
    rows = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(rows, -1).astype(dtype_of("int64"))


@lowering("aten::repeat_interleave.self_int", int64="moves", dims=dimensions.repeat)
def repeat_interleave(
    x: Any, repeats: Any, dim: int | None = None, *, output_size: Any = None
) -> jax.Array:
    """Repeats each element a number of times."""
    if dim is None:
        x, dim = x.reshape(-1), 0
    x = x.reshape(1) if x.ndim == 0 else x
    dim = dim % x.ndim
    y = jnp.broadcast_to(
        jnp.expand_dims(x, dim + 1), (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
    )
    return y.reshape(*x.shape[:dim], x.shape[dim] * repeats, *x.shape[dim + 1 :])


@lowering("aten::repeat_interleave.self_Tensor", int64="moves", dims=dimensions.repeat)
def repeat_interleave_by(
    x: Any, repeats: Any, dim: int | None = None, *, output_size: Any = None
) -> jax.Array:
    """Repeats each element as often as an array says; its values, or the output size, are known."""
    if dim is None:
        x, dim = x.reshape(-1), 0
    x = x.reshape(1) if x.ndim == 0 else x
    repeats = jnp.broadcast_to(repeats, (x.shape[dim],))
    return jnp.take(x, repeat_indices(repeats, output_size=output_size), axis=dim)


@lowering("aten::repeat_interleave.Tensor", int64="moves", dims=dimensions.repeat)
def repeat_indices(repeats: Any, *, output_size: Any = None) -> jax.Array:
    """Repeats each index as often as an array says."""
    at = jnp.arange(repeats.shape[0], dtype=dtype_of("int64"))
    if output_size is None or not isinstance(repeats, jax.core.Tracer):
        return jnp.asarray(np.repeat(np.asarray(at), np.asarray(repeats)), at.dtype)
    return jnp.repeat(at, repeats, total_repeat_length=output_size)
