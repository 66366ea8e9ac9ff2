"""Finds numbers of rows that are equal, since their masks are views of one mask."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import sympy  # type: ignore[import-untyped]

from fmapper.programs import Graph, Ref
from fmapper_adapters.torch.from_fx.size_facts import SizeFacts

# Views that keep all elements in their order.
_VIEWS = frozenset(
    {"view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze", "alias", "clone"}
)


def unite_counts(graph: Graph, facts: SizeFacts) -> SizeFacts:
    """Returns the facts with one symbol for the true elements of a mask and of its views.

    torch uses a different symbol for each of them: `y[mask] += f(x[mask.view(-1)])` adds rows of
    two numbers.
    """
    origins: dict[str, str] = {}
    symbols: dict[str, Any] = {}
    united: dict[Any, Any] = {}
    for call in graph.calls:
        name = call.op.partition("::")[2].partition(".")[0]
        first = call.args[0] if call.args else None
        if name in _VIEWS and isinstance(first, Ref) and _has_all(facts, call.name, first.name):
            origins[call.name] = origins.get(first.name, first.name)
        given = [index for index in call.args[1] if index is not None] if name == "index" else []
        if len(given) != 1 or facts.dtypes.get(given[0].name) != "bool":
            continue
        size = facts.shapes[call.name][call.args[1].index(given[0])]
        if isinstance(size, sympy.Symbol) and size in facts.symbols:
            origin = origins.get(given[0].name, given[0].name)
            united[size] = symbols.setdefault(origin, united.get(size, size))
    united = {size: other for size, other in united.items() if size != other}
    if not united:
        return facts

    def unite(size: Any) -> Any:
        return size if isinstance(size, int) else sympy.sympify(size).xreplace(united)

    return dataclasses.replace(
        facts,
        shapes={name: tuple(map(unite, shape)) for name, shape in facts.shapes.items()},
        numbers={name: unite(number) for name, number in facts.numbers.items()},
        fixed={unite(symbol): number for symbol, number in facts.fixed.items()},
    )


def _has_all(facts: SizeFacts, view: str, base: str) -> bool:
    """Returns whether a view has as many elements as its base, whose number is known."""
    shapes = facts.shapes.get(view, ()), facts.shapes.get(base, ())
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return False
    return math.prod(shapes[0]) == math.prod(shapes[1])
