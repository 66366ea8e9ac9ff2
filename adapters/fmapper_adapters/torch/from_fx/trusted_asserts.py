"""Checks that a program asserts what its recording assumed about values.

It works on torch's symbols, which a program knows only by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

_READ = {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}
_ASSERTION = torch.ops.aten._assert_scalar.default


def is_asserted(graph: fx.Graph, expressions: Iterable[Any]) -> bool:
    """Returns whether each value read in a graph and used in an expression is asserted.

    `draft_export` of torch 2.11 follows the examples where a boolean tensor decides, and omits the
    assertion.
    """
    assumed = " ".join(str(expression) for expression in expressions)
    words = set("".join(c if c.isalnum() else " " for c in assumed).split())
    return all(
        _leads_to_assertion(node)
        for node in graph.nodes
        if node.target in _READ
        and words & {str(symbol) for symbol in free_unbacked_symbols(node.meta.get("val"))}
    )


def _leads_to_assertion(node: fx.Node) -> bool:
    reached, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user.target is _ASSERTION:
                return True
            if user not in reached:
                reached.add(user)
                todo.append(user)
    return False
