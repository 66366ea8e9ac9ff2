"""Rewrites a graph by the list of recognisers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fmapper.programs import Graph, substitute
from fmapper_adapters.torch.fuse import (
    activations,
    attention,
    broadcasts,
    dense,
    moves,
    norms,
    softmax,
    uniform,
    windows,
)
from fmapper_adapters.torch.fuse.fold import fold
from fmapper_adapters.torch.fuse.rewriter import Rewriter


def simplify(
    graph: Graph,
    kinds: Mapping[str, Any],
    roles: Mapping[str, str],
    *,
    fused: bool = True,
    borders: Iterable[str] = (),
) -> tuple[Graph, dict[str, Any]]:
    """Rewrites a graph with fewer, larger calls; returns it and the replaced names.

    Args:
        graph: The graph.
        kinds: dtype and shape of its inputs, by name.
        roles: The inputs that are arrays of the model, as for `GraphIndex`.
        fused: Whether to fuse primitives; if not, only constants and broadcasts are simplified.
        borders: Arguments and results of submodules, as for `GraphIndex`.
    """
    taken = {*graph.inputs, *(call.name for call in graph.calls)}
    borders = set(borders)
    rewritten = fold(graph, kinds, borders).without_dead_calls(lambda call: False)
    moved: dict[str, Any] = {}
    for find in (*(_RECOGNISERS if fused else ()), moves.find, broadcasts.find):
        rewritten, replaced = Rewriter(rewritten, kinds, roles, taken, borders).run(rewritten, find)
        moved = {name: substitute(value, replaced) for name, value in moved.items()} | replaced
    return rewritten, moved


# The order matters: attention contains softmax, a layer norm contains means.
_RECOGNISERS = (
    uniform.find,
    windows.find,
    windows.find_repeats,
    activations.find,
    softmax.find,
    attention.find,
    norms.find,
    norms.find_mean,
    dense.turn,
    dense.absorb,
    dense.find,
)
