"""Structures of results, with objects as records of the file; which results are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fmapper.programs.program import Call, Graph, Part, Program, refs_in
from fmapper.programs.treespec import TreeSpec
from fmapper.translation.code import identifier
from fmapper.translation.functions.forms import Made, kind_of_field

Records = dict[str, dict[str, str]]


def results_of(program: Program, records: Records) -> Any:
    """Returns the structure of values that a program gives.

    Args:
        program: The program.
        records: Classes of the file -> their fields, and what those are if no array; is added to.
    """
    values = [
        value
        for value, output in zip(program.graph.outputs, program.outputs, strict=True)
        if output.kind == "user"
    ]
    return _unflatten(program.out_spec, iter(values), records)


def _unflatten(spec: TreeSpec, leaves: Iterator[Any], records: Records) -> Any:
    if spec.kind == "leaf":
        return next(leaves)
    children = [_unflatten(one, leaves, records) for one in spec.children]
    if spec.kind == "dict":
        return dict(zip(spec.keys, children, strict=True))
    if spec.kind != "record":
        return tuple(children)
    keys: tuple[str, ...] = ()
    for key in spec.keys:  # no field of a named tuple begins with an underscore
        keys = (*keys, identifier(str(key).lstrip("_") or "field", keys))
    cls = identifier(re.sub(r"\W", "_", spec.name) or "Output")
    fields = dict(zip(keys, map(kind_of_field, children), strict=True))
    if records.get(cls, fields) != fields:
        cls = identifier(cls, records)
    records[cls] = fields
    return Made(cls, dict(zip(keys, children, strict=True)))


def with_results(
    graph: Graph, parts: Sequence[Part], keep: Callable[[Call], bool] = lambda call: False
) -> Graph:
    """Removes dead calls, but keeps every result of a part of which any result is used.

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
