"""Names for the values of a recording that survive the later passes of `torch.export`."""

from __future__ import annotations

import operator
from typing import Any

import torch

from fmapper_adapters.torch import _private

# Operations that return their argument if it has the shape and dtype of the result.
_SAME = frozenset(
    {
        "_to_copy",
        "alias",
        "clone",
        "contiguous",
        "detach",
        "expand",
        "reshape",
        "slice",
        "to",
        "view",
    }
)


def name_in_recording(tensor: torch.Tensor, same: dict[str, str]) -> str:
    """Returns the name of the node that computed a tensor in a recording; empty without one.

    The node is marked with the name. Nodes that return their argument, such as dropout in
    evaluation, are dropped later.

    Args:
        tensor: The tensor.
        same: Names of nodes -> names of nodes with the same value; extended.
    """
    node = _private.node_in_recording(tensor)
    if node is None:
        return ""
    name, kind = str(node.name), (str(tuple(tensor.shape)), str(tensor.dtype))
    while node.op != "placeholder":
        mark = node.name, kind, _sizes(node)
        node.meta["custom"] = {**node.meta.get("custom", {}), "fmapper": mark}
        _mark_item(node, mark)
        before = node.args[0] if node.args and _is_identity(node) else None
        if not isinstance(before, torch.fx.Node) or _kind(before) != _kind(node):
            break
        same[str(node.name)] = str(before.name)
        node = before
    return name


def _mark_item(node: torch.fx.Node, mark: tuple[Any, ...]) -> None:
    """Adds the mark of one result to a node with several results.

    If the node is decomposed, its new results inherit its marks.
    """
    if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
        whole = node.args[0].meta
        custom = whole.get("custom", {})
        items = {**custom.get("fmapper_items", {}), node.args[1]: mark}
        whole["custom"] = {**custom, "fmapper_items": items}


def _mark_of(node: torch.fx.Node) -> Any:
    custom = node.meta.get("custom") or {}
    if "fmapper" in custom or node.target is not operator.getitem:
        return custom.get("fmapper")
    return custom.get("fmapper_items", {}).get(node.args[1])


def _kind(node: torch.fx.Node) -> tuple[str, str]:
    value = node.meta.get("val")
    return str(tuple(getattr(value, "shape", ()))), str(getattr(value, "dtype", None))


def _sizes(node: torch.fx.Node) -> str:
    """Returns a node's sizes for the examples, since names of symbols are lost on the way."""
    shape = getattr(node.meta.get("val"), "shape", ())
    sizes = [size if isinstance(size, int) else getattr(size.node, "hint", None) for size in shape]
    return str(sizes)


def _fit(node: torch.fx.Node, mark: tuple[Any, ...]) -> int:
    """Returns how well a node fits a mark: 2 for its shape, 1 for its sizes in the examples."""
    if _kind(node) == tuple(mark[1]):
        return 2
    is_alike = _kind(node)[1] == mark[1][1] and "None" not in mark[2]
    return int(is_alike and _sizes(node) == mark[2])


def _is_identity(node: torch.fx.Node) -> bool:
    """Returns whether a node returns its argument if that has the same shape and dtype."""
    op = getattr(node.target, "_opname", "")
    if op in ("dropout", "feature_dropout"):
        rate, training = node.args[1:3]
        return training is False or (isinstance(rate, float) and rate == 0)
    return op in _SAME


def marks_of_recording(graph: torch.fx.Graph) -> dict[str, str]:
    """Maps names by `name_in_recording` to those of the same nodes in a graph.

    If a node was decomposed, this is the last resulting node of its shape and dtype, if any: a
        write to a view also leaves the view's base, which has another shape.
    """
    best: dict[str, tuple[int, str]] = {}
    for node in graph.nodes:
        mark = _mark_of(node)
        if mark is None or "assert" in node.name:
            continue
        fit = _fit(node, mark)
        if fit >= best.get(mark[0], (0, ""))[0]:
            best[mark[0]] = fit, node.name
    return {name: node for name, (_, node) in best.items()}
