"""Rewrites copies of rows selected by a mask as selections between two arrays.

`x[mask] = y[mask]` has rows whose number depends on values, which requires fixed sizes and padding.
`torch.where(mask, y, x)` has the same values and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fmapper_adapters.torch import _private

_aten = torch.ops.aten
_PUTS = (_aten.index_put_.default, _aten.index_put.default)
_CHECKS = (_aten.sym_size.int, _aten._assert_scalar.default, _aten.sym_constrain_range.default)


def choose_by_masks(exported: torch.export.ExportedProgram) -> None:
    """Replaces copies of masked rows between arrays of one shape."""
    graph = exported.graph
    copies: list[Any] = [node for node in graph.nodes if node.target in _PUTS and _is_copy(node)]
    for put in copies:
        picked = put.args[2]
        _choose(graph, put, picked.args[0])
        _erase(graph, picked)
    if copies:
        exported.graph_module.recompile()


def _is_copy(put: Node) -> bool:
    """Returns whether a call writes rows selected by the same mask from an array of its shape."""
    given: Any = put.args
    x, indices, picked = given[:3]
    if any(given[3:]) or put.kwargs or not isinstance(picked, Node):
        return False
    rows: Any = picked.args
    if picked.target is not _aten.index.Tensor or [*rows[1]] != [*indices]:
        return False
    mask = indices[-1]
    if mask is None or any(index is not None for index in indices[:-1]):
        return False
    y = _value(rows[0])
    is_alike = (y.dtype, str(tuple(y.shape))) == (_value(x).dtype, str(tuple(_value(x).shape)))
    is_mask = _value(mask).dtype is torch.bool
    return is_mask and is_alike and not any(map(_changes, _between(picked, put)))


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _changes(node: Node) -> bool:
    """Returns whether a node may write to an array."""
    schema = _private.schema_of(node.target)
    return not _is_arithmetic(node) if schema is None else bool(schema.is_mutable)


def _choose(graph: Any, put: Any, y: Node) -> None:
    x, indices = put.args[:2]
    mask = indices[-1]
    with graph.inserting_before(put):
        for _ in range(_value(x).dim() - len(indices) + 1 - _value(mask).dim()):
            mask = _call(graph, put, _aten.unsqueeze.default, mask, -1)
        if put.target is _aten.index_put.default:
            put.target, put.args = _aten.where.self, (mask, y, x)
        else:
            chosen = _call(graph, put, _aten.where.self, mask, y, x)
            put.target, put.args = _aten.copy_.default, (x, chosen)


def _call(graph: Any, put: Any, target: Any, *args: Any) -> Any:
    """Adds a call in the place of another one."""
    node = graph.call_function(target, args)
    node.meta = {key: value for key, value in put.meta.items() if key != "custom"}
    values = torch.fx.node.map_arg(args, _value)
    with _value(put).fake_mode:
        node.meta["val"] = target(*values)
    return node


def _erase(graph: Any, picked: Node) -> None:
    """Erases unused rows, and the checks of their number."""
    nodes = [picked]
    for node in nodes:
        nodes += [user for user in node.users if user not in nodes]
    if all(node is picked or _is_check(node) for node in nodes):
        for node in sorted(nodes, key=[*graph.nodes].index, reverse=True):
            graph.erase_node(node)


def _is_check(node: Node) -> bool:
    return node.target in _CHECKS or _is_arithmetic(node)


def _is_arithmetic(node: Node) -> bool:
    return getattr(node.target, "__module__", "") == "_operator"


def _value(node: Any) -> Any:
    return node.meta["val"]
