"""Writes loops over any dimension of arrays: `x.unbind(1)` for the rows of `x.transpose(0, 1)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fmapper_adapters.torch.model.control_flow import loop_begin, loop_end


def write_dimensions(graph: Any) -> None:
    """Has loops take and give rows along the dimensions that are moved to the front, or from there.

    Those are the keywords `dims` of the marks of loops, a number for each array.
    """
    for node in list(graph.nodes):
        if node.target is loop_begin:
            moved = [_source(x, node) for x in node.args[1]]
            node.args = (node.args[0], tuple(x for x, _ in moved))
            node.kwargs = {**node.kwargs, "dims": tuple(dim for _, dim in moved)}
        elif node.target is loop_end:
            _, carry, ys = node.args
            picks = {one.args[1]: one for one in node.users}
            dims = [_result(picks.get(len(carry) + i)) for i in range(len(ys))]
            node.kwargs = {**node.kwargs, "dims": tuple(dims)}


def _order(node: Any) -> tuple[int, ...] | None:
    if not isinstance(node, fx.Node) or (node.op, node.target) != ("call_method", "permute"):
        return None
    order: Any = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
    return tuple(int(i) % len(order) for i in order)


def _source(x: Any, loop: fx.Node) -> tuple[Any, int]:
    """Returns the array whose rows along a dimension are those of another along the first."""
    order = _order(x)
    if order is None or len(x.users) != 1:
        return x, 0
    rest = [i for i in range(len(order)) if i != order[0]]
    is_own = x.meta.get("place", ("",))[0] == loop.meta.get("place", ("",))[0]
    return (x.args[0], order[0]) if is_own and list(order[1:]) == rest else (x, 0)


def _result(pick: fx.Node | None) -> int:
    """Drops a move of the first dimension of a result of a loop; returns where that is to be."""
    users = [] if pick is None else list(pick.users)
    order = _order(users[0]) if len(users) == 1 else None
    if pick is None or order is None or users[0].meta.get("place") is None:
        return 0
    (moved,) = users
    dim = order.index(0)
    if [i for i in order if i] != list(range(1, len(order))):
        return 0
    if moved.meta["place"][0] != pick.meta.get("place", ("",))[0]:
        return 0
    pick.meta["val"] = moved.meta["val"]
    if moved.meta.get("border"):
        pick.meta["border"] = True
    moved.replace_all_uses_with(pick)
    moved.graph.erase_node(moved)
    return dim


def write_fills(graph: Any) -> None:
    """Rewrites `torch.full((), 0.0).expand(2, 3)` as `torch.full((2, 3), 0.0)`, in place."""
    for node in list(graph.nodes):
        if (node.op, node.target) != ("call_method", "expand"):
            continue
        source, *sizes = node.args
        if getattr(source, "target", None) is not torch.full or source.args[0] != ():
            continue
        shape = sizes[0] if isinstance(sizes[0], tuple | list) else sizes
        if -1 in shape:
            continue
        kwargs = {"dtype": node.meta["val"].dtype, "device": source.kwargs.get("device")}
        with graph.inserting_before(node):
            made = graph.call_function(torch.full, (tuple(shape), source.args[1]), kwargs)
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
