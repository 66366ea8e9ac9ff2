"""The results of submodules in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fmapper.programs.program import Call, Graph, Part, refs_in


def keep_results_of_parts(
    graph: Graph, parts: Sequence[Part], keep: Callable[[Call], bool] = lambda call: False
) -> Graph:
    """Removes dead calls, but keeps all results of a part if any of them is used.

    A part that is called separately returns all of them.

    Args:
        graph: The graph.
        parts: The calls of submodules in it.
        keep: Returns whether a call always stays.
    """
    results = {part.name: {*refs_in((part.result,))} for part in parts}
    kept: set[str] = set()

    def stays(call: Call) -> bool:
        return keep(call) or call.name in kept

    while True:
        live = graph.without_dead_calls(stays)
        used = {*refs_in(live.outputs), *(ref for call in live.walk() for ref in call.refs())}
        new = {name for group in results.values() if group & used for name in group} - kept
        if not new:
            return live
        kept.update(new)
