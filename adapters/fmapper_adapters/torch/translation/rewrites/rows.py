"""Writes rows at indices, sums of rows by segments, and the largest elements, as JAX has them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def take_rows(x: Any, index: Any, dim: int = 0) -> Any:
    """Marks a choice of rows, which a helper of files makes. It does not run."""
    raise NotImplementedError("rows at indices are written to files only")


def segment_sum(values: Any, segments: Any, like: Any) -> Any:
    """Marks a sum of rows by segments, which a helper of files computes. It does not run."""
    raise NotImplementedError("sums of segments are written to files only")


def segment_max(values: Any, segments: Any, like: Any) -> Any:
    """Marks the largest rows by segments, which a helper of files finds. It does not run."""
    raise NotImplementedError("largest rows of segments are written to files only")


def top_k(x: Any, k: int, dim: int) -> Any:
    """Marks a choice of the largest elements, which a helper makes. It does not run."""
    raise NotImplementedError("the largest elements are written to files only")


def write_rows(graph: Any) -> None:
    """Rewrites look-ups and sums whose indices are checked as calls of these functions."""
    _write_positions(graph)
    for node in list(graph.nodes):
        if node.target is torch.gather:
            _write_top_k(graph, node)
            continue
        made = _WRITTEN.get(node.target)
        found = made(node) if made is not None else None
        if found is None:
            continue
        function, args = found
        with graph.inserting_before(node):
            new = graph.call_function(function, args)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _write_positions(graph: Any) -> None:
    """Leaves out the checks of indices that are all positions of a dimension, or one for each."""
    for node in list(graph.nodes):
        if not _is(node, torch.clamp) or len(node.args) != 3 or node.args[1] != 0:
            continue
        chosen = _before_cast(node.args[0])
        if chosen is node.args[0] or not _is(chosen, torch.where):
            continue
        ids, last = chosen.args[2], node.args[2]
        if not _is_from_the_end(chosen):
            continue
        if _is(ids, torch.arange) and len(ids.args) == 1 and _are_below(last, ids.args[0]):
            with graph.inserting_before(node):
                kwargs = {"device": ids.kwargs.get("device")}
                found = graph.call_function(torch.arange, ids.args, kwargs)
            found.meta.update(node.meta)
        else:
            found = _best_of(ids, last)
        if found is not None:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _best_of(ids: Any, last: Any) -> Any:
    """Returns the `torch.argmax` along a dimension up to `last` that indices are; else None."""
    best: Any = ids.args[0] if isinstance(ids, fx.Node) and _is_int32(ids) else None
    if not _is(best, torch.argmax, torch.argmin) or len(best.args) != 2 or best.kwargs:
        return None
    x, dim = best.args
    return best if type(dim) is int and _are_below(last, x.meta["val"].shape[dim]) else None


def _is_from_the_end(chosen: Any) -> bool:
    """Returns whether a choice adds a size to indices below 0."""
    negative, other, ids = chosen.args
    is_negative = _is(negative, torch.lt, operator.lt) and negative.args == (ids, 0)
    return is_negative and _is(other, torch.add, operator.add) and other.args[0] is ids


def _are_below(last: Any, size: Any) -> bool:
    """Returns whether positions below a size are none behind the last one."""
    known = size.meta.get("val") if isinstance(size, fx.Node) else size
    if type(known) is int and type(last) is int:
        return known - 1 <= last
    return known is not None and _is_same(last, known - 1)


def _take(node: Any) -> tuple[Any, tuple[Any, ...]] | None:
    x, dim, index = node.args
    size = x.meta["val"].shape[dim]
    chosen = _without_clamp(index, size)
    if not _is(chosen, torch.where):
        return None
    _, other, ids = chosen.args
    if not _is_from_the_end(chosen):
        return None
    end = other.args[1]
    end = end.args[1] if _is(end, torch.full) and end.args[0] == () else end
    if not _is_same(end, size) or ids.meta["val"].ndim != 1:
        return None
    return take_rows, (x, ids, dim) if dim else (x, ids)


def _sum(node: Any) -> tuple[Any, tuple[Any, ...]] | None:
    base, dim, index, rows = node.args
    if dim != 0 or node.kwargs or not _is(rows, torch.where) or rows.args[2] != 0:
        return None
    ids = _segments(index, rows.args[0], base)
    return None if ids is None else (segment_sum, (rows.args[1], ids, base))


def _largest(node: Any) -> tuple[Any, tuple[Any, ...]] | None:
    base, dim, index, rows, *how = node.args
    if dim != 0 or how != ["amax"] or node.kwargs or not _is(rows, torch.where):
        return None
    values = rows.args[1]
    is_whole = isinstance(values, fx.Node) and _is_same(
        values.meta["val"].shape, index.meta["val"].shape
    )
    if rows.args[2] != float("-inf") or not is_whole:
        return None
    ids = _segments(_without_views(index), rows.args[0], base)
    return None if ids is None else (segment_max, (values, ids, base))


def _segments(index: Any, mask: Any, base: Any) -> Any:
    """Returns to which rows values go, from them clamped and which of them are within; or None."""
    size = base.meta["val"].shape[0]
    ids, mask = _without_clamp(index, size), _without_views(mask)
    if ids is None or not _is(mask, operator.and_, torch.logical_and, torch.bitwise_and):
        return None
    low, high = mask.args
    is_least = (
        _is(low, operator.ge, torch.ge) and _before_cast(low.args[0]) is ids and low.args[1] == 0
    )
    is_most = _is(high, operator.le, torch.le) and _before_cast(high.args[0]) is ids
    return ids if is_least and is_most and _is_same(high.args[1], size - 1) else None


def _without_views(value: Any) -> Any:
    while (
        isinstance(value, fx.Node)
        and value.op == "call_method"
        and value.target in ("view", "reshape", "expand")
    ):
        value = value.args[0]
    return value


_WRITTEN = {torch.index_select: _take, torch.index_add: _sum, torch.scatter_reduce: _largest}


def _write_top_k(graph: Any, node: Any) -> None:
    """Writes a stable sort by the total order of floats, the first of which are taken."""
    x, dim, at = node.args
    others = [user for user in at.users if user is not node] if isinstance(at, fx.Node) else []
    if x.meta["val"].dtype is not torch.float32 or not all(map(_is_int32, others)):
        return
    k = _count_of_first(at, dim)
    order = at.args[0]
    sort = order.args[0] if k is not None and _is(order, operator.getitem) else None
    if sort is None or order.args[1] != 1 or not _is(sort, torch.sort):
        return
    told = {"dim": dim, "descending": True, "stable": True}
    if sort.kwargs != told or not _is_total_order(sort.args[0], x):
        return
    with graph.inserting_before(at):
        found = graph.call_function(top_k, (x, k, dim))
        found.meta.update({**node.meta, "val": (node.meta["val"], at.meta["val"].int())})
        parts = [graph.call_function(operator.getitem, (found, i)) for i in (0, 1)]
    for i, one in enumerate(parts):
        one.meta.update({**node.meta, "val": found.meta["val"][i]})
    for one, made in ((node, parts[0]), *((other, parts[1]) for other in others)):
        one.replace_all_uses_with(made)
        graph.erase_node(one)


def _is_int32(value: Any) -> bool:
    is_cast = (value.op, value.target) == ("call_method", "to")
    return is_cast and value.args[1:] == (torch.int32,) and not value.kwargs


def _count_of_first(value: Any, dim: int) -> int | None:
    """Returns how many of the first elements of a dimension a value has; None for others."""
    if _is(value, torch.narrow, "narrow") and value.args[1:3] == (dim, 0):
        return int(value.args[3])
    if not _is(value, operator.getitem) or not isinstance(value.args[1], tuple):
        return None
    *before, last = value.args[1]
    is_whole = all(one == slice(None) for one in before) and len(before) == dim
    is_first = isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)
    return last.stop if is_whole and is_first and type(last.stop) is int else None


def _is_total_order(value: Any, x: fx.Node) -> bool:
    """Returns whether a value is the bits of floats, as integers in the order of the floats."""
    if not _is(value, torch.where):
        return False
    negative, flipped, bits = value.args
    is_view = isinstance(bits, fx.Node) and (bits.target, bits.args[1:]) == ("view", (torch.int32,))
    if not is_view or not _is(negative, operator.lt, torch.lt) or negative.args != (bits, 0):
        return False
    if not _is(flipped, operator.xor, torch.bitwise_xor) or flipped.args != (bits, 0x7FFFFFFF):
        return False
    source = bits.args[0]
    return source is x or (source.target == "detach" and source.args == (x,))


def _without_clamp(index: Any, size: Any) -> Any:
    """Returns what is clamped to the rows of an array; None if an index is something else."""
    if not _is(index, torch.clamp) or len(index.args) != 3 or index.args[1] != 0:
        return None
    return _before_cast(index.args[0]) if _is_same(index.args[2], size - 1) else None


def _before_cast(value: Any) -> Any:
    is_cast = isinstance(value, fx.Node) and (value.op, value.target) == ("call_method", "to")
    return value.args[0] if is_cast and value.args[1:] == (torch.int64,) else value


def _is(value: Any, *targets: Any) -> bool:
    return isinstance(value, fx.Node) and value.target in targets


def _is_same(value: Any, size: Any) -> bool:
    """Returns whether a value is a size, however it was computed."""
    known = value.meta.get("val") if isinstance(value, fx.Node) else value
    return known is not None and str(known) == str(size)
