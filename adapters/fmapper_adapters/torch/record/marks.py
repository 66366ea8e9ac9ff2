"""Names for the values of a recording that survive the later passes of `torch.export`."""

from __future__ import annotations

import torch

from fmapper_adapters.torch import _private

# Operations that return their argument where it has the shape and dtype of the result.
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
        same: Names of nodes -> of those that have the same value; for such a node it is added.
    """
    node = _private.node_in_recording(tensor)
    if node is None:
        return ""
    name, kind = str(node.name), (str(tuple(tensor.shape)), str(tensor.dtype))
    while node.op != "placeholder":
        node.meta["custom"] = {**node.meta.get("custom", {}), "fmapper": (node.name, kind)}
        before = node.args[0] if node.args and _is_identity(node) else None
        if not isinstance(before, torch.fx.Node) or _kind(before) != _kind(node):
            break
        same[str(node.name)] = str(before.name)
        node = before
    return name


def _kind(node: torch.fx.Node) -> tuple[str, str]:
    value = node.meta.get("val")
    return str(tuple(getattr(value, "shape", ()))), str(getattr(value, "dtype", None))


def _is_identity(node: torch.fx.Node) -> bool:
    """Returns whether a node whose argument has its shape and dtype returns that."""
    op = getattr(node.target, "_opname", "")
    if op in ("dropout", "feature_dropout"):
        rate, training = node.args[1:3]
        return training is False or (isinstance(rate, float) and rate == 0)
    return op in _SAME


def marks_of_recording(graph: torch.fx.Graph) -> dict[str, str]:
    """Maps names by `name_in_recording` to those of the same nodes in a graph.

    If a node was decomposed, this is the last resulting node of its shape and dtype.
    """
    found: dict[str, tuple[bool, str]] = {}
    for node in graph.nodes:
        mark = (node.meta.get("custom") or {}).get("fmapper")
        if mark is None or "assert" in node.name:
            continue
        fits = _kind(node) == tuple(mark[1])
        if fits or not found.get(mark[0], (False, ""))[0]:
            found[mark[0]] = fits, node.name
    return {name: node for name, (_, node) in found.items()}
