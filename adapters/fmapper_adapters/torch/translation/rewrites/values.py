"""Magnitudes and copies where nothing has a derivative, and unit matrices."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fmapper_adapters.torch.model import fx_passes

_COMPARISONS = {
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
    torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne,
}  # fmt: skip


def write_magnitudes(graph: fx.Graph, *, everywhere: bool = False) -> None:
    """Writes `torch.where(torch.signbit(x), -x, x)` as `torch.abs(x)` where it has no derivative.

    Args:
        graph: Is changed in place.
        everywhere: Nothing in it has one, as in the forward method of a `torch.autograd.Function`;
            else that is so for what is only compared.
    """
    for node in list(graph.nodes):
        x = _magnitude_of(node)
        if x is not None and (everywhere or all(u.target in _COMPARISONS for u in node.users)):
            node.target, node.args = torch.abs, (x,)
    graph.eliminate_dead_code(fx_passes.is_kept)


def _magnitude_of(node: fx.Node) -> Any:
    """Returns the x whose magnitude a node computes as JAX differentiates it; None for others."""
    if node.target is not torch.where or len(node.args) != 3:
        return None
    sign: Any
    negated: Any
    x: Any
    sign, negated, x = node.args
    if not all(isinstance(one, fx.Node) for one in node.args):
        return None
    if sign.target is not torch.signbit or sign.args[0] is not x:
        return None
    if getattr(negated, "target", None) not in (operator.neg, torch.neg, "neg"):
        return None
    if negated.args[0] is not x:
        return None
    is_sum = x.target in (operator.add, torch.add)
    return x.args[0] if is_sum and x.args[1] == 0 else x


def drop_detachments(graph: fx.Graph) -> None:
    """Leaves out `x.detach()` where nothing has a derivative, in place."""
    for node in list(graph.nodes):
        if (node.op, node.target) == ("call_method", "detach"):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def write_clamps(graph: fx.Graph) -> None:
    """Writes the larger and the smaller of an array and a number as `torch.clamp`, in place.

    That has other derivatives where both are equal, and another sign of zero.
    """
    for node in list(graph.nodes):
        end = {torch.maximum: "min", torch.minimum: "max"}.get(node.target)
        pairs = [node.args, node.args[::-1]] if end is not None else []
        for x, other in pairs:
            number = _number_of(other, x)
            if number:
                node.target, node.args, node.kwargs = torch.clamp, (x,), {end: number}
                break
    graph.eliminate_dead_code(fx_passes.is_kept)
    for node in list(graph.nodes):
        if node.target is torch.clamp and len(node.args) == 1:
            _join_clamps(node)
    graph.eliminate_dead_code(fx_passes.is_kept)


def _number_of(node: Any, like: Any) -> Any:
    """Returns the number of which a tensor consists, if it has the dtype of another; or None."""
    at = {torch.full: 1, "new_full": 2}.get(getattr(node, "target", None))
    if at is None or isinstance(node.args[at], fx.Node):
        return None
    one, other = node.meta["val"], like.meta["val"]
    return node.args[at] if one.shape == () and one.dtype is other.dtype else None


def _join_clamps(node: Any) -> None:
    """Writes the clamp of a clamp as one, from the smaller number to the larger."""
    (source,) = node.args
    if source.target is not torch.clamp or len(source.args) != 1 or len(source.users) != 1:
        return
    low, high = source.kwargs.get("min"), node.kwargs.get("max")
    if low is not None and high is not None and low <= high:
        node.args, node.kwargs = (source.args[0], low, high), {}


def write_unit_matrices(graph: fx.Graph) -> None:
    """Writes `(i.reshape(-1, 1) == i.reshape(1, -1)).to(dtype)`, i a range, as `torch.eye`."""
    for node in list(graph.nodes):
        if (node.op, node.target) != ("call_method", "to") or len(node.args) != 2:
            continue
        same, dtype = node.args
        made = _range_of(same) if isinstance(dtype, torch.dtype) else None
        if made is None:
            continue
        kwargs = {} if dtype is torch.float32 else {"dtype": dtype}
        kwargs["device"] = made.kwargs.get("device")
        with graph.inserting_before(node):
            eye = graph.call_function(torch.eye, (made.args[0],), kwargs)
        eye.meta.update(node.meta)
        node.replace_all_uses_with(eye)
        graph.erase_node(node)
    graph.eliminate_dead_code(fx_passes.is_kept)


def _range_of(node: Any) -> fx.Node | None:
    """Returns the range whose numbers are compared with each other; None for other nodes."""
    if getattr(node, "target", None) not in (operator.eq, torch.eq):
        return None
    sides = [_as_shaped(one) for one in node.args]
    if None in sides:
        return None
    (rows, first), (columns, second) = sides  # type: ignore[misc]
    is_plain = rows is columns and rows.target is torch.arange and len(rows.args) == 1
    return rows if is_plain and (first, second) == ((-1, 1), (1, -1)) else None


def _as_shaped(node: Any) -> tuple[fx.Node, tuple[Any, ...]] | None:
    """Returns what a node reshapes, and to which shape."""
    if getattr(node, "op", "") != "call_method" or node.target not in ("reshape", "view"):
        return None
    source, *shape = node.args
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    return source, tuple(sizes)
