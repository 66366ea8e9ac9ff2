"""Lookup and assignment by arrays of indices."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from typing import Any

from fmapper.translation import Printing, Value, expr, literal, text
from fmapper_adapters.jax.translation.promotion import call_of, convert, number, number_in
from fmapper_adapters.jax.translation.subscripts import insert, slice_of
from fmapper_adapters.jax.translation.table import prints

Index = Value | None


@prints("aten::embedding")
def embedding(
    p: Printing,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Prints `jnp.take(weight, indices, axis=0)`."""
    if scale_grad_by_freq or padding_idx >= 0:
        return None
    return expr("jnp.take({0}, {1}, axis=0)", weight, indices)


def _subscript(x: Value, indices: Sequence[Index]) -> ast.expr | None:
    """Returns `x[:, i]` for arrays of indices; None with masks, which have no known shape."""
    if any(i is not None and i.dtype in ("bool", "uint8") for i in indices):
        return None
    items = [ast.Slice() if i is None else literal(i) for i in indices]
    while isinstance(items[-1], ast.Slice):
        items.pop()
    index = items[0] if len(items) == 1 else ast.Tuple(items, ast.Load())
    return ast.Subscript(literal(x), index, ast.Load())


@prints("aten::index", "aten::_unsafe_index")
def index(p: Printing, x: Value, indices: Sequence[Index]) -> Any:
    """Prints `x[indices]`."""
    return _subscript(x, indices)


@prints("aten::index_put", "aten::_unsafe_index_put")
def index_put(
    p: Printing, x: Value, indices: Sequence[Index], values: Value, accumulate: bool = False
) -> Any:
    """Prints `x.at[indices].set(values)`; under a mask `jnp.where(mask, value, x)`."""
    known = [i for i in indices if i is not None]
    if len(known) == 1 and known[0].dtype == "bool":
        mask = known[0]
        if accumulate or indices[0] is None or values.shape not in ((), (1,)):
            return None
        if mask.ndim > x.ndim or not mask.ndim:
            return None
        for _ in range(x.ndim - mask.ndim):
            mask = Value(insert(mask, mask.ndim), mask.dtype, (*mask.shape, 1))
        value = number_in(values)
        value = convert(value, x.dtype) if isinstance(value, Value) else number(value)
        return expr("jnp.where({0}, {1}, {2})", mask, value, x)
    at = _subscript(Value(expr("{0}.at", x), x.dtype, x.shape), indices)
    if at is None or (accumulate and x.dtype == "bool"):
        return None
    template = "{0}.add({1})" if accumulate else "{0}.set({1})"
    return expr(template, at, convert(values, x.dtype))


@prints("aten::index_add")
def index_add(
    p: Printing, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1
) -> Any:
    """Prints `x.at[:, index].add(source)`."""
    if not x.ndim or index.ndim != 1 or alpha != 1 or x.dtype == "bool":
        return None
    at = _subscript(Value(expr("{0}.at", x), x.dtype, x.shape), [None] * (dim % x.ndim) + [index])
    return None if at is None else expr("{0}.add({1})", at, convert(source, x.dtype))


@prints("fmapper::bounded_nonzero")
def bounded_nonzero(p: Printing, mask: Value) -> Any:
    """Prints `places_of(mask)`."""
    return expr("places_of({0})", mask)


@prints("aten::index_select")
def index_select(p: Printing, x: Value, dim: int, index: Value) -> Any:
    """Prints `jnp.take(x, index, axis=dim)`."""
    if not x.ndim or not index.ndim:
        return None
    return expr("jnp.take({0}, {1}, axis={2})", x, index, dim)


def _others_fit(x: Value, index: Value, dim: int) -> bool:
    """Returns whether an index has the sizes of the array in all dimensions but one."""
    if not x.ndim or x.ndim != index.ndim or 0 in index.shape:
        return False
    dim %= x.ndim
    return all(
        a == b for d, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if d != dim
    )


@prints("aten::gather")
def gather(p: Printing, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Any:
    """Prints `jnp.take_along_axis(x, index, axis=dim)`."""
    if not _others_fit(x, index, dim):
        return None
    return expr("jnp.take_along_axis({0}, {1}, axis={2})", x, index, dim)


@prints("aten::take_along_dim")
def take_along_dim(p: Printing, x: Value, indices: Value, dim: int | None = None) -> Any:
    """Prints `jnp.take_along_axis(x, indices, axis=dim)`."""
    if dim is None or not x.ndim:
        return None
    return expr("jnp.take_along_axis({0}, {1}, axis={2})", x, indices, dim)


@prints("aten::scatter.src", "aten::scatter.value")
def scatter(p: Printing, x: Value, dim: int, index: Value, source: Any) -> Any:
    """Prints `jnp.put_along_axis(x, index, source, axis=dim, inplace=False)`."""
    if not _others_fit(x, index, dim):
        return None
    source = number_in(source)
    if isinstance(source, Value):
        if source.shape != index.shape:
            return None
        source = convert(source, x.dtype)
    elif isinstance(source, float) and x.dtype.startswith(("int", "uint", "bool")):
        return None
    return call_of("jnp.put_along_axis", x, index, number(source), axis=dim, inplace=False)


@prints("aten::slice_scatter")
def slice_scatter(
    p: Printing,
    x: Value,
    source: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Any:
    """Prints `x.at[:, start:end].set(source)`."""
    if isinstance(start, Value) or isinstance(end, Value):
        return None
    if source.shape == x.shape and step == 1:
        return convert(source, x.dtype)
    size = x.shape[dim]
    start = None if isinstance(start, int) and start == 0 else start
    if isinstance(end, int) and (end >= sys.maxsize or (isinstance(size, int) and end >= size)):
        end = None
    items: list[ast.expr] = [ast.Slice() for _ in range(dim % x.ndim)]
    items.append(slice_of(start, end, None if step == 1 else step))
    at = items[0] if len(items) == 1 else ast.Tuple(items, ast.Load())
    made: Any = convert(source, x.dtype)
    if isinstance(source.node, ast.Call) and text(source.node.func) == "jnp.full":
        made = source.node.args[1]
    return expr("{0}.set({1})", ast.Subscript(expr("{0}.at", x), at, ast.Load()), made)


@prints("aten::select_scatter")
def select_scatter(p: Printing, x: Value, source: Value, dim: int, index: Any) -> Any:
    """Prints `x.at[:, index].set(source)`."""
    if isinstance(index, Value):
        return None
    items: list[ast.expr] = [ast.Slice() for _ in range(dim % x.ndim)]
    items.append(literal(index))
    at = items[0] if len(items) == 1 else ast.Tuple(items, ast.Load())
    place = ast.Subscript(expr("{0}.at", x), at, ast.Load())
    return expr("{0}.set({1})", place, convert(source, x.dtype))


@prints("aten::bucketize.Tensor")
def bucketize(
    p: Printing, x: Value, boundaries: Value, *, out_int32: bool = False, right: bool = False
) -> Any:
    """Prints `jnp.searchsorted(boundaries, x)`."""
    return searchsorted(p, boundaries, x, right=right)


@prints("aten::searchsorted.Tensor")
def searchsorted(
    p: Printing,
    edges: Value,
    x: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Any:
    """Prints `jnp.searchsorted(edges, x)`."""
    if edges.ndim != 1 or edges.dtype != x.dtype or sorter is not None:
        return None
    return call_of("jnp.searchsorted", edges, x, side="right" if right or side == "right" else None)
