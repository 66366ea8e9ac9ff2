"""Runs the passes over a program with recorded submodules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from fmapper.programs import (
    Call,
    Graph,
    Output,
    Part,
    Program,
    Ref,
    refs_in,
    substitute,
)
from fmapper.programs.reading import keep_results_of_parts
from fmapper_adapters.torch.from_fx.conditions import with_plain_conditions
from fmapper_adapters.torch.passes import order
from fmapper_adapters.torch.passes.static_sizes import PADDED

_EFFECTS = ("aten::_assert", "aten::_print")


def with_parts(program: Program, run: order.Pass) -> Program:
    """Runs the passes while keeping track of the arguments and results of parts.

    Meanwhile, the values that parts refer to are outputs of the program, so that passes keep them.
    """
    graph = program.graph
    there = {*graph.inputs, *(call.name for call in graph.calls)}
    parts = [(part.arguments, part.result) for part in program.parts]
    names = [name for name in dict.fromkeys(refs_in(tuple(parts))) if name in there]
    makers = _rows_made(program)
    places = [-1 if name in makers else PADDED for name in names]
    kept = [*program.outputs, *(Output("user", place) for place in places)]
    calls, copies = _with_copies(graph.calls, {*names})
    outputs = (*graph.outputs, *(Ref(copies.get(name, name)) for name in names))
    wider = dataclasses.replace(
        program,
        graph=Graph(graph.inputs, calls, outputs, graph.kinds),
        outputs=tuple(kept),
    )
    done = run(wider)
    count = len(done.graph.outputs) - len(names)
    copied = {c.name: c.args[0] for c in done.graph.calls if c.name in copies.values()}
    left = [
        copied.get(output.name, output) if isinstance(output, Ref) else output
        for output in done.graph.outputs[count:]
    ]
    replaced = dict(zip(names, left, strict=True))
    done.parts = tuple(
        dataclasses.replace(
            part,
            arguments=substitute(part.arguments, replaced),
            result=substitute(part.result, replaced),
        )
        for part in program.parts
    )
    done.graph = Graph(
        done.graph.inputs,
        _in_their_parts(done.graph.calls, done.parts),
        done.graph.outputs[:count],
        done.graph.kinds,
    )
    done.graph = keep_results_of_parts(
        done.graph, done.parts, lambda call: call.op.startswith(_EFFECTS)
    )
    done.outputs = done.outputs[:count]
    return with_plain_conditions(done)


def _rows_made(program: Program) -> set[str]:
    """Returns the results of parts that select rows by values, which determines their number.

    Padding would change these results, unlike those of parts whose arguments are padded already.
    """
    calls = program.graph.calls
    unknown = {call.name for call in calls if _UNKNOWN.search(str(call.result))}
    by_name = {part.name: part for part in program.parts}
    makers = set()
    for call in calls:
        place = call.module if call.name in unknown and not unknown & {*call.refs()} else None
        while place in by_name and place not in makers:
            makers.add(place)
            place = by_name[place].parent
    return {name for part in makers for name in refs_in((by_name[part].result,))} & unknown


_UNKNOWN = re.compile(r"\bu\d+")


def _with_copies(calls: Sequence[Call], names: set[str]) -> tuple[list[Call], dict[str, str]]:
    """Copies values before a call changes them in place, since parts have returned the old values.

    Returns:
        The calls, and the values -> their copies.
    """
    changed = {
        call.args[0].name
        for call in calls
        if call.op.partition(".")[0].endswith("_") and call.args and isinstance(call.args[0], Ref)
    }
    extended: list[Call] = []
    copies: dict[str, str] = {}
    for call in calls:
        extended.append(call)
        if call.name in changed & names and len(call.result) == 1:
            copies[call.name] = f"{call.name}_before"
            copy = dataclasses.replace(call, name=copies[call.name], op="aten::clone.default")
            extended.append(dataclasses.replace(copy, args=(Ref(call.name),), kwargs={}))
    return extended, copies


def _in_their_parts(calls: Sequence[Call], parts: Sequence[Part]) -> list[Call]:
    """Moves calls that compute a part's arguments to the part whose results they are.

    torch recomputes a view of a changed tensor where it is used: a linear layer may then contain
    the operation of the `Flatten` before it.
    """
    by_name = {part.name: part for part in parts}
    given = {part.name: {*refs_in((part.arguments,))} for part in parts}
    results: dict[str, list[Part]] = {}
    for part in parts:
        if isinstance(part.result, Ref):
            results.setdefault(part.result.name, []).append(part)
    users: dict[str, list[str]] = {}
    for call in calls:
        inner = [reader for graph in call.graphs() for reader in graph.walk()]
        for value in {value for reader in (call, *inner) for value in reader.refs()}:
            users.setdefault(value, []).append(call.name)
    borders = {*refs_in(tuple((part.arguments, part.result) for part in parts))}
    moved: dict[str, tuple[str, str]] = {}  # call -> its old part, its new part
    for call in reversed(calls):
        place = call.module
        while place and call.name in given.get(place, ()):
            place = by_name[place].parent
        if place != call.module:
            makers = [part for part in results.get(call.name, ()) if part.parent == place]
            while makers:
                place = makers[0].name
                makers = [part for part in results[call.name] if part.parent == place]
            moved[call.name] = call.module, place
            continue
        onto = {moved.get(user) for user in users.get(call.name, ())}
        follow = next(iter(onto)) if len(onto) == 1 and call.name not in borders else None
        if follow is not None and follow[0] == call.module:
            moved[call.name] = follow
    return [
        dataclasses.replace(call, module=moved[call.name][1]) if call.name in moved else call
        for call in calls
    ]
