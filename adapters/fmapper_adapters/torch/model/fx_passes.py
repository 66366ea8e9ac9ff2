"""Passes over a finished graph: common subexpressions, permutations that cancel, causal masks.

They work on torch's graph, the output of lowerings: a program has fewer, larger calls without
common subexpressions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fmapper_adapters.torch.model import fast_attention

_ASSERTIONS = {torch.ops.aten._assert_async.msg, torch.ops.aten._assert_scalar.default}


def is_kept(node: fx.Node) -> bool:
    """Returns whether an unused node must be kept."""
    return node.op in ("placeholder", "output") or node.target in _ASSERTIONS


def draws(node: fx.Node) -> bool:
    """Returns whether an operation of torch draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def share(graph: fx.Graph) -> None:
    """Eliminates common subexpressions of a graph."""
    changed = {node.args[0] for node in graph.nodes if _is_in_place(node)}
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method", "get_attr"):
            continue
        if node in changed or _is_in_place(node) or getattr(node.target, "is_control_flow", False):
            continue
        if draws(node) or is_kept(node):
            continue
        key = node.op, node.target, _freeze(node.args), _freeze(node.kwargs)
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # an argument without a hash
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_in_place(node: fx.Node) -> bool:
    """Returns whether a call changes its first argument: its name ends with a single `_`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call") and name.endswith("_") and not name.endswith("__")


def _freeze(value: Any) -> Any:
    """Makes arguments hashable, with 1, 1.0 and True apart."""
    if isinstance(value, tuple | list):
        return tuple(map(_freeze, value))
    if isinstance(value, dict):
        return tuple((key, _freeze(inner)) for key, inner in value.items())
    if isinstance(value, slice):
        return "slice", _freeze((value.start, value.stop, value.step))
    return (type(value), repr(value)) if isinstance(value, float | int) else value


def compose_permutations(graph: fx.Graph, *, across: bool = True) -> None:
    """Composes consecutive permutations, and drops those that cancel.

    Args:
        graph: The graph.
        across: Whether to compose permutations of different submodules too.
    """
    for node in list(graph.nodes):
        order, first = _permutation(node), node.args[0] if node.args else None
        before = _permutation(first) if order is not None else None
        if order is None or before is None or not isinstance(first, fx.Node):
            continue
        if not across and node.meta.get("place", "")[:1] != first.meta.get("place", "")[:1]:
            continue
        source = first.args[0]
        composed = tuple(before[i] for i in order)
        if composed == tuple(range(len(composed))):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        else:
            node.target, node.args, node.kwargs = "permute", (source, composed), {}
    graph.eliminate_dead_code(is_kept)


def _permutation(node: Any) -> tuple[int, ...] | None:
    """Returns the permutation of a node; None for other nodes."""
    if not isinstance(node, fx.Node) or node.op != "call_method":
        return None
    if node.target == "permute" and len(node.args) == 2:
        order: Any = node.args[1]
        return tuple(order)
    if node.target == "movedim" and all(isinstance(i, int) for i in node.args[1:]):
        rank = node.meta["val"].ndim
        start, end = (int(str(i)) % rank for i in node.args[1:])
        rest = [i for i in range(rank) if i != start]
        return (*rest[:end], start, *rest[end:])
    return None


def mark_causal(graph: fx.Graph, constants: dict[str, torch.Tensor]) -> None:
    """Marks attention whose mask is causal.

    Args:
        graph: The graph.
        constants: The tensors that the graph reads from the module, by name.
    """
    for node in graph.nodes:
        mask = node.kwargs.get("mask")
        if node.target is not fast_attention.attend or mask is None:
            continue
        if mask.op == "get_attr" and _is_causal(constants.get(str(mask.target))):
            node.kwargs = {**node.kwargs, "is_causal": True}


def _is_causal(mask: torch.Tensor | None) -> bool:
    if mask is None or mask.dtype is not torch.bool or mask.ndim < 2:
        return False
    rows, columns = mask.shape[-2:]
    if rows != columns or mask[..., 0, 0].numel() != 1:
        return False
    return bool((mask == torch.ones(rows, columns, dtype=torch.bool).tril()).all())
