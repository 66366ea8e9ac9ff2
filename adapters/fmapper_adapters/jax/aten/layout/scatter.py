"""Lookup and assignment element by element along one dimension."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.table import dimensions, lowering
from fmapper_adapters.jax.aten.types import cast, is_floating, wide


@lowering("aten::gather", int64="moves", dims=dimensions.gather)
def gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> jax.Array:
    """Returns, for each element of index, the element of x at that index of one dimension."""
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    if x.ndim == 0 or index.ndim == 0:
        return jnp.take(x.reshape(-1), index)
    dim = dim % x.ndim
    x = x[tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(index.shape))]
    return jnp.take_along_axis(x, index, dim)


@lowering("aten::take_along_dim", int64="moves")
def take_along_dim(x: Any, indices: Any, dim: int | None = None) -> jax.Array:
    """Gathers, with the other dimensions broadcast; without a dimension, x is one row."""
    if dim is None:
        return jnp.take(x.reshape(-1), indices.reshape(-1))
    return jnp.take_along_axis(x, indices, dim)


def _places(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Returns indices into x for the elements of an array with the shape of `index`."""
    dim = dim % x.ndim
    return tuple(
        index if d == dim else jax.lax.broadcasted_iota("int32", index.shape, d)
        for d in range(x.ndim)
    )


def _with_dims(x: Any, index: Any, source: Any) -> tuple[Any, Any, Any]:
    """Gives all arguments at least one dimension, and crops the source to the index."""
    x, index = (a.reshape(1) if a.ndim == 0 else a for a in (x, index))
    if is_array(source):
        source = source.reshape(1) if source.ndim == 0 else source
        source = cast(source[tuple(slice(n) for n in index.shape)], x.dtype)
    else:
        source = jnp.broadcast_to(cast(source, x.dtype), index.shape)
    return x, index, source


def is_array(x: Any) -> bool:
    """Returns whether a value is an array rather than a number."""
    return isinstance(x, jax.Array) and not getattr(x, "weak_type", False)


@lowering("aten::scatter.src", "aten::scatter.value", int64="moves", elements=(3,))
def scatter(x: Any, dim: int, index: Any, source: Any) -> jax.Array:
    """Returns the array with elements replaced at indices of one dimension."""
    if index.size == 0:
        return x
    y, index, source = _with_dims(x, index, source)
    return y.at[_places(y, dim, index)].set(source).reshape(x.shape)


@lowering("aten::scatter_add")
def scatter_add(x: Any, dim: int, index: Any, source: Any) -> jax.Array:
    """Returns the array with elements added at indices of one dimension, also several at one."""
    if index.size == 0:
        return x
    y, index, source = _with_dims(x, index, source)
    at = y.at[_places(y, dim, index)]
    return (at.max(source) if x.dtype == bool else at.add(source)).reshape(x.shape)


@lowering("aten::scatter.reduce", "aten::scatter.value_reduce", elements=(3,))
def scatter_by(x: Any, dim: int, index: Any, source: Any, *, reduce: str) -> jax.Array:
    """Returns the array with elements added or multiplied into it."""
    if reduce == "add":
        return scatter_add(x, dim, index, source)
    return scatter_reduce(x, dim, index, source, "prod")


@lowering("aten::scatter_reduce")
def scatter_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> jax.Array:
    """Reduces the elements at each place by sum, prod, mean, amax or amin.

    With `include_self=False`, the array's own elements count only where nothing is added. The mean
    of integers is rounded down. Ties of amax and amin share the gradient.
    """
    if index.size == 0:
        return x
    y, index, source = _with_dims(x, index, source)
    places = _places(y, dim, index)
    return _reduce(y, places, source, reduce, include_self).reshape(x.shape)


@lowering("aten::index_reduce")
def index_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> jax.Array:
    """Reduces the slices at each index by prod, mean, amax or amin."""
    if index.size == 0:
        return x
    y = x.reshape(1) if x.ndim == 0 else x
    source = cast(source.reshape(1) if source.ndim == 0 else source, x.dtype)
    shape = [1] * y.ndim
    shape[dim % y.ndim] = -1
    each = jnp.broadcast_to(index.reshape(shape), source.shape)
    places = _places(y, dim, each)
    return _reduce(y, places, source, reduce, include_self).reshape(x.shape)


def _reduce(x: Any, places: Any, source: Any, reduce: str, include_self: bool) -> jax.Array:
    if x.dtype == bool:
        number = _reduce(x.astype("int32"), places, source.astype("int32"), reduce, include_self)
        return number.astype(bool)
    if reduce == "sum":
        start = x if include_self else _replace(x, places, 0)
        return start.at[places].add(source)
    if reduce == "mean":
        return _mean(x, places, source, include_self)
    if reduce == "prod":
        return _prod(x, places, source, include_self)
    return _extreme(x, places, source, reduce == "amax", include_self)


def _replace(x: Any, places: Any, value: Any) -> jax.Array:
    """Returns the array with a number at places; unlike an assignment it can be transposed."""
    here = jnp.zeros(x.shape, bool).at[places].set(True)
    return jnp.where(here, jnp.asarray(value, x.dtype), x)


def _mean(x: Any, places: Any, source: Any, include_self: bool) -> jax.Array:
    y, source = x.astype(wide(x.dtype)), source.astype(wide(x.dtype))
    start = y if include_self else _replace(y, places, 0)
    sums = start.at[places].add(source)
    counts = jnp.full(x.shape, int(include_self), "int32").at[places].add(1)
    counts = jnp.maximum(counts, 1).astype(y.dtype)
    exact = is_floating(y) or jnp.issubdtype(y.dtype, jnp.complexfloating)
    return (sums / counts if exact else sums // counts).astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _extreme(x: Any, places: Any, source: Any, largest: bool, include_self: bool) -> Any:
    start = x if include_self else _replace(x, places, _end(x.dtype, low=largest))
    return start.at[places].max(source) if largest else start.at[places].min(source)


def _end(dtype: Any, *, low: bool) -> Any:
    if is_floating(dtype):
        return jnp.asarray(-jnp.inf if low else jnp.inf, dtype)
    span = np.iinfo(dtype)
    return jnp.asarray(span.min if low else span.max, dtype)


@_extreme.defjvp
def _extreme_jvp(largest: bool, include_self: bool, primals: Any, tangents: Any) -> Any:
    x, places, source = primals
    dx, _, dsource = tangents
    y = _extreme(x, places, source, largest, include_self)
    of_x = (x == y).astype(x.dtype)
    given = (source == y[places]).astype(x.dtype)
    # torch counts the array's own elements among the ties even where include_self is False
    ties = jnp.maximum(of_x.at[places].add(given), 1)
    kept = of_x * dx
    if not include_self:
        kept = _replace(kept, places, 0)
    return y, (kept.at[places].add(given * dsource)) / ties


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _prod(x: Any, places: Any, source: Any, include_self: bool) -> Any:
    start = x if include_self else _replace(x, places, 1)
    return start.at[places].multiply(source)


@_prod.defjvp
def _prod_jvp(include_self: bool, primals: Any, tangents: Any) -> Any:
    x, places, source = primals
    dx, _, dsource = tangents
    if not include_self:
        # the array's own elements, where something is put, are a factor of one without a gradient
        x, dx = _replace(x, places, 1), _replace(dx, places, 0)
    y = _prod(x, places, source, True)
    one = jnp.ones((), x.dtype)
    own_zero, zero = x == 0, source == 0
    zeros = own_zero.astype("int32").at[places].add(zero.astype("int32"))
    others = jnp.where(own_zero, one, x).at[places].multiply(jnp.where(zero, one, source))
    # the product of all other factors, also where one of them is zero
    of_x = _others(own_zero, x, zeros, others)
    given = _others(zero, source, zeros[places], others[places])
    return y, (of_x * dx).at[places].add(given * dsource)


def _others(is_zero: Any, factor: Any, zeros: Any, product: Any) -> Any:
    nothing = jnp.zeros((), product.dtype)
    if_zero = jnp.where(zeros == 1, product, nothing)
    if_not = jnp.where(zeros == 0, product / jnp.where(is_zero, 1, factor), nothing)
    return jnp.where(is_zero, if_zero, if_not)
