"""The results of submodules in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fmapper.programs.program import Call, Graph, Part, refs_in


def keep_results_of_parts(
    graph: Graph, parts: Sequence[Part], keep: Callable[[Call], bool] = lambda call: False
) -> Graph:
    """Removes dead calls, but keeps all results of a part if any of them is used.

    A part that is called alone returns them all.

    Args:
        graph: The graph.
        parts: The calls of submodules in it.
        keep: Whether a call stays in any case.
    """
    results = {part.name: {*refs_in((part.result,))} for part in parts}
    kept: set[str] = set()

    def stays(call: Call) -> bool:
        return keep(call) or call.name in kept

    while True:
        found = graph.without_dead_calls(stays)
        used = {*refs_in(found.outputs), *(ref for call in found.walk() for ref in call.refs())}
        new = {name for one in results.values() if one & used for name in one} - kept
        if not new:
            return found
        kept.update(new)
