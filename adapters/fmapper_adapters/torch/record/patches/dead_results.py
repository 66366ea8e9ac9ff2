"""Keeps the results of submodules in a recording, even if their callers do not use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree

_MARK = "fmapper_result"


def mark(result: object) -> None:
    """Marks the nodes that compute the result of a submodule, so that they are kept."""
    for leaf in pytree.tree_leaves(result):
        node = _private.node_in_recording(leaf) if isinstance(leaf, torch.Tensor) else None
        if node is not None and node.op != "placeholder":
            node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: node.name}


@contextlib.contextmanager
def keep() -> Iterator[None]:
    """Makes torch keep marked nodes when it removes dead code within the block."""
    graphs: Any = torch.fx.Graph
    eliminate = graphs.eliminate_dead_code

    def eliminate_but_results(
        graph: torch.fx.Graph, is_impure_node: Callable[[torch.fx.Node], bool] | None = None
    ) -> bool:
        results = _lost_results(graph)

        def is_kept(node: torch.fx.Node) -> bool:
            if node in results:
                return True
            return node.is_impure() if is_impure_node is None else is_impure_node(node)

        return bool(eliminate(graph, is_kept))

    graphs.eliminate_dead_code = eliminate_but_results
    try:
        yield
    finally:
        graphs.eliminate_dead_code = eliminate


def _lost_results(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Returns the results of submodules that nothing uses.

    All nodes that a result was decomposed into have its mark. If any of them is used, so is the
    result, and dead ones (the mask of dropout) are not kept. Otherwise the first dead one is the
    result.
    """
    groups: dict[str, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        name = (node.meta.get("custom") or {}).get(_MARK)
        if name is not None:
            groups.setdefault(name, []).append(node)
    lost = set()
    for group in groups.values():
        users = {user for node in group for user in node.users}
        if users <= {*group}:
            lost.add(next(node for node in group if not node.users))
    return lost
