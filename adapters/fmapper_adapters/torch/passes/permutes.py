"""Cancels permutations of dimensions that undo each other.

torch leaves such pairs if a module writes to a view: the base is computed from the written view,
    and the view again from the base where it is used.
"""

from __future__ import annotations

import dataclasses

from fmapper.programs import Call, Program, Ref, refs_in, substitute

_PERMUTE = "aten::permute.default"


def cancel_permutes(program: Program) -> Program:
    """Replaces arrays that are permuted and permuted back by the originals."""
    graph = program.graph
    made = {call.name: call for call in graph.calls}
    fixed = _find_fixed(graph.calls)
    passed = {*refs_in(tuple((part.arguments, part.result) for part in program.parts))}
    replaced: dict[str, Ref] = {}
    for call in graph.calls:
        before = made.get(call.args[0].name) if call.op == _PERMUTE else None
        if before is None or before.op != _PERMUTE or not _undo(before, call):
            continue
        if before.name in passed and before.module != call.module:
            continue  # arguments and results of submodules keep their order of dimensions
        source = before.args[0]
        if not fixed & {call.name, before.name, source.name}:
            replaced[call.name] = replaced.get(source.name, source)
    if not replaced:
        return program
    calls = [
        dataclasses.replace(
            call, args=substitute(call.args, replaced), kwargs=substitute(call.kwargs, replaced)
        )
        for call in graph.calls
        if call.name not in replaced
    ]
    outputs = substitute(graph.outputs, replaced)
    used = {*refs_in(outputs)} | fixed
    kept = []
    for call in reversed(calls):
        if call.op != _PERMUTE or call.name in used:
            kept.append(call)
            used.update(call.refs())
    new = dataclasses.replace(graph, calls=kept[::-1], outputs=outputs)
    return dataclasses.replace(program, graph=new)


def _undo(first: Call, second: Call) -> bool:
    """Returns whether the second of two permutations undoes the first."""
    count = len(first.args[1])
    combined = [first.args[1][at] % count for at in second.args[1]]
    return combined == [*range(count)]


def _find_fixed(calls: list[Call]) -> set[str]:
    """Returns the values that inner graphs use or that calls write to."""
    fixed = set()
    for call in calls:
        if call.op.partition(".")[0].endswith("_"):
            fixed.update(call.refs())
        for graph in call.graphs():
            fixed.update(refs_in(graph.outputs))
            for inner in graph.walk():
                fixed.update(inner.refs())
    return fixed
