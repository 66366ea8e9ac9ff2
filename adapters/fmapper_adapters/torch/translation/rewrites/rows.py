"""Writes rows at indices, and sums of rows by segments, with the meaning of indices in JAX."""

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


def write_rows(graph: Any) -> None:
    """Rewrites look-ups and sums whose indices are checked as calls of these functions."""
    for node in list(graph.nodes):
        made = {torch.index_select: _take, torch.index_add: _sum}.get(node.target)
        found = made(node) if made is not None else None
        if found is None:
            continue
        function, args = found
        with graph.inserting_before(node):
            new = graph.call_function(function, args)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _take(node: Any) -> tuple[Any, tuple[Any, ...]] | None:
    x, dim, index = node.args
    size = x.meta["val"].shape[dim]
    chosen = _without_clamp(index, size)
    if not _is(chosen, torch.where):
        return None
    negative, other, ids = chosen.args
    if not _is(negative, torch.lt, operator.lt) or negative.args != (ids, 0):
        return None
    if not _is(other, torch.add, operator.add) or other.args[0] is not ids:
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
    size = base.meta["val"].shape[0]
    ids = _without_clamp(index, size)
    mask = rows.args[0]
    while (
        isinstance(mask, fx.Node)
        and mask.op == "call_method"
        and mask.target in ("view", "reshape")
    ):
        mask = mask.args[0]
    if ids is None or not _is(mask, operator.and_, torch.logical_and, torch.bitwise_and):
        return None
    low, high = mask.args
    is_least = (
        _is(low, operator.ge, torch.ge) and _before_cast(low.args[0]) is ids and low.args[1] == 0
    )
    is_most = _is(high, operator.le, torch.le) and _before_cast(high.args[0]) is ids
    if not is_least or not is_most or not _is_same(high.args[1], size - 1):
        return None
    return segment_sum, (rows.args[1], ids, base)


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
