"""The context in which recognisers rewrite a graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fmapper.programs import Call, Graph, Ref, Size, substitute
from fmapper_adapters.torch.fuse.graph_index import GraphIndex


class Rewriter:
    """The context of a recogniser: the graph, and a place for new calls.

    Args:
        graph: The graph.
        kinds: dtype and shape of its inputs, by name.
        roles: The inputs that are arrays of the model.
        taken: Names that no new call may have; the names of new calls are added.
        borders: Arguments and results of submodules, as for `GraphIndex`.

    Attributes:
        index: The graph.
    """

    def __init__(
        self,
        graph: Graph,
        kinds: Mapping[str, Any],
        roles: Mapping[str, str],
        taken: set[str],
        borders: set[str],
    ) -> None:
        self.index = GraphIndex(graph, kinds, roles, borders)
        self._taken = taken
        self._new: list[Call] = []
        self._model: Call | None = None

    def call(self, op: str, *args: Any, shape: tuple[Any, ...], dtype: str, **kwargs: Any) -> Ref:
        """Inserts a new call before the current one."""
        base = op.rpartition("::")[2]
        name = next(n for n in _names(base) if n not in self._taken)
        self._taken.add(name)
        assert self._model is not None
        if "new_sizes" in kwargs:
            sizes = kwargs["new_sizes"]
            kwargs["new_sizes"] = tuple(Size(n) if isinstance(n, str) else n for n in sizes)
        made = Call(
            name, op, args, kwargs, self._model.module, self._model.source, ((dtype, tuple(shape)),)
        )
        self._new.append(made)
        return self.index.add(made)

    def run(
        self, graph: Graph, find: Callable[[Rewriter, Call], Any]
    ) -> tuple[Graph, dict[str, Any]]:
        """Rewrites the graph by `find`, which returns None for most calls.

        Returns:
            The graph, and the replacements by name.
        """
        replaced: dict[str, Any] = {}
        calls: list[Call] = []
        for call in graph.calls:
            current = _replace(call, replaced)
            self.index.calls[call.name] = current
            self._model, self._new, self.index.reader = current, [], current.module
            replacement = find(self, current)
            calls += self._new
            if replacement is None:
                calls.append(current)
            else:
                replaced[call.name] = replacement
                if isinstance(replacement, Ref):
                    self.index.replace(call.name, replacement.name)
        outputs = substitute(graph.outputs, replaced)
        made = Graph(graph.inputs, calls, outputs, graph.kinds)
        return made.without_dead_calls(lambda call: False), replaced


def _replace(call: Call, replaced: dict[str, Any]) -> Call:
    if not any(name in replaced for name in call.refs()):
        return call
    args, kwargs = substitute(call.args, replaced), substitute(call.kwargs, replaced)
    return replace(call, args=args, kwargs=kwargs)


def _names(base: str) -> Iterator[str]:
    return itertools.chain((base,), (f"{base}_{i}" for i in itertools.count(1)))
