"""Rewrites the conditions that a program asserts in terms of the arrays they are read from."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fmapper.programs import Call, Graph, Program, Ref, refs_in

_ASSERTIONS = ("aten::_assert_scalar", "aten::_assert_async")
_READS = ("aten::_local_scalar_dense.default", "aten::item.default")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"sym::{name}": getattr(operator, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "not_", "and_", "or_")
}
_FUNCTIONS["sym::sym_not"] = operator.not_
_FUNCTIONS["sym::sym_ite"] = lambda condition, yes, no: yes if condition else no


def with_plain_conditions(program: Program) -> Program:
    """Rewrites conditions so that each boolean array is asserted once, directly.

    torch reads the array as a number, and asserts that it is at least 0, at most 1, and equal to
    the recorded value.
    """
    graph = program.graph
    if not any(call.op.startswith(_ASSERTIONS) for call in graph.calls):
        return program
    by_name = {call.name: call for call in graph.calls}
    calls: list[Call] = []
    asserted: set[tuple[str, bool]] = set()
    for call in graph.calls:
        condition = _condition(call, by_name) if call.op.startswith(_ASSERTIONS) else None
        if condition is None:
            calls.append(call)
            continue
        array, wanted = condition
        if wanted is None or (array, wanted) in asserted:
            continue
        asserted.add((array, wanted))
        if not wanted:
            no = f"not_{call.name}"
            inverse = Call(no, "aten::logical_not.default", (Ref(array),), {}, call.module)
            calls.append(replace(inverse, source=call.source, result=(("bool", ()),)))
            array = no
        calls.append(replace(call, args=(Ref(array), *call.args[1:])))
    given = set(refs_in(tuple(part.result for part in program.parts)))
    return replace(
        program, graph=_without_idle(Graph(graph.inputs, calls, graph.outputs, graph.kinds), given)
    )


def _condition(call: Call, by_name: Mapping[str, Call]) -> tuple[str, bool | None] | None:
    """Returns the boolean array behind an assertion, and the asserted value, or None.

    The second is None if the assertion always holds.
    """
    reads: dict[str, str] = {}

    def value(of: Any, answer: bool) -> Any:
        if not isinstance(of, Ref):
            return of
        made = by_name.get(of.name)
        if made is None or made.kwargs:
            raise KeyError(of.name)
        if made.op in _READS:
            reads[made.name] = _plain(made.args[0], by_name)
            return answer
        return _FUNCTIONS[made.op](*(value(arg, answer) for arg in made.args))

    if not call.args or not isinstance(call.args[0], Ref):
        return None
    try:
        answers = bool(value(call.args[0], True)), bool(value(call.args[0], False))
    except (KeyError, TypeError):
        return None
    if len(reads) != 1 or not any(answers):
        return None
    array = next(iter(reads.values()))
    if not array or (not answers[0] and not answers[1]):
        return None
    return array, None if all(answers) else answers[0]


def _plain(array: Any, by_name: Mapping[str, Call]) -> str:
    """Returns the name of a bool array before its comparison with zero; empty for others."""
    made = by_name.get(array.name) if isinstance(array, Ref) else None
    if made is None or not made.result or made.result[0] != ("bool", ()):
        return ""
    if made.op.startswith("aten::ne.Scalar") and made.args[1] == 0:
        return _plain(made.args[0], by_name) or made.name
    return made.name


def _without_idle(graph: Graph, given: set[str]) -> Graph:
    """Removes numbers that have become unused, and their comparisons."""
    calls = graph.calls
    while True:
        used = {n for call in calls for n in call.refs()} | {*refs_in(graph.outputs)} | given
        kept = [call for call in calls if call.name in used or not _is_number(call)]
        if len(kept) == len(calls):
            return Graph(graph.inputs, calls, graph.outputs, graph.kinds)
        calls = kept


def _is_number(call: Call) -> bool:
    return (
        call.op in _READS
        or (call.op.startswith("sym::") and call.op != "sym::getitem")
        or call.op.startswith("aten::ne.Scalar")
    )
