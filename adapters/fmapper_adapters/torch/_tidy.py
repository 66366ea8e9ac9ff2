"""Rewrites of a finished graph: what is computed twice, and masks that are causal."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional


def share(graph: fx.Graph) -> None:
    """Computes once what a graph computes several times from the same values."""
    changed = {node.args[0] for node in graph.nodes if _is_in_place(node)}
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method", "get_attr"):
            continue
        if node in changed or _is_in_place(node) or getattr(node.target, "is_control_flow", False):
            continue
        key = node.op, node.target, _frozen(node.args), _frozen(node.kwargs)
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # of an argument that has no hash
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_in_place(node: fx.Node) -> bool:
    """Whether a call changes its first argument: by custom its name ends with one underscore."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call") and name.endswith("_") and not name.endswith("__")


def _frozen(value: Any) -> Any:
    """Arguments with a hash, in which 1, 1.0 and True are not the same."""
    if isinstance(value, tuple | list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(inner)) for key, inner in value.items())
    if isinstance(value, slice):
        return "slice", _frozen((value.start, value.stop, value.step))
    return (type(value), repr(value)) if isinstance(value, float | int) else value


def mark_causal(graph: fx.Graph, constants: dict[str, torch.Tensor]) -> None:
    """Tells attention that its mask lets each place see what is not behind it.

    Args:
        graph: The graph.
        constants: The tensors that it gets from the module by name; those that are no longer used
            are taken out.
    """
    for node in graph.nodes:
        mask = node.kwargs.get("attn_mask")
        if node.target is not functional.scaled_dot_product_attention or mask is None:
            continue
        if mask.op == "get_attr" and _is_causal(constants.get(str(mask.target))):
            node.kwargs = {**node.kwargs, "attn_mask": None, "is_causal": True}
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    for name in [name for name in constants if name not in used]:
        del constants[name]


def _is_causal(mask: torch.Tensor | None) -> bool:
    if mask is None or mask.dtype is not torch.bool or mask.ndim < 2:
        return False
    rows, columns = mask.shape[-2:]
    if rows != columns or mask[..., 0, 0].numel() != 1:
        return False
    return bool((mask == torch.ones(rows, columns, dtype=torch.bool).tril()).all())
