"""Arrays that become one: what torch takes apart stands in files as in the model's own code."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fmapper.programs import Call, Graph, Program, Ref, refs_in

Kinds = Mapping[str, tuple[str, tuple[Any, ...]]]


def with_stacks(program: Program) -> Program:
    """Returns a program in which arrays that are stacked are so by one call.

    torch.export leaves a concatenation of arrays with a new dimension, or one whose result is given
    the new dimension.
    """
    graph = program.graph
    made = {call.name: call for call in graph.calls}
    uses = Counter(name for call in graph.calls for name in call.refs())
    uses.update(refs_in(graph.outputs))
    for part in program.parts:
        uses.update(refs_in((part.arguments, part.result)))
    kinds = {call.name: call.result[0] for call in graph.calls if len(call.result) == 1}
    kinds |= {
        name: (given.dtype, given.shape)
        for name, given in zip(graph.inputs, program.inputs, strict=True) if given.is_array()
    }  # fmt: skip
    found: dict[str, Call] = {}
    for call in graph.calls:
        stack = _of_wide(call, made) or _of_view(call, made, uses, kinds)
        if stack is not None:
            found[call.name] = dataclasses.replace(
                call, op="aten::stack.default", args=stack, kwargs={}
            )
    if not found:
        return program
    calls = [found.get(call.name, call) for call in graph.calls]
    was = {ref for call in found.values() for ref in made[call.name].refs()}
    left = Graph(graph.inputs, calls, graph.outputs, graph.kinds)
    told = {*refs_in([(part.arguments, part.result) for part in program.parts])}
    kept = left.without_dead_calls(lambda call: call.name not in was - told)
    return dataclasses.replace(program, graph=kept)


def _of_wide(call: Call, made: Mapping[str, Call]) -> tuple[Any, ...] | None:
    """Finds `cat([x.unsqueeze(d), y.unsqueeze(d)], d)`."""
    if call.op != "aten::cat.default" or not isinstance(call.args[0], tuple):
        return None
    dim = _dim(call, len(call.result[0][1]))
    parts = []
    for one in call.args[0]:
        wide = made.get(one.name)
        if wide is None or wide.op != "aten::unsqueeze.default" or wide.module != call.module:
            return None
        if wide.args[1] % len(wide.result[0][1]) != dim:
            return None
        parts.append(wide.args[0])
    return _arguments(parts, dim)


def _of_view(
    call: Call, made: Mapping[str, Call], uses: Mapping[str, int], kinds: Kinds
) -> tuple[Any, ...] | None:
    """Finds `cat([x, y], d).view(...)` with a new dimension of two."""
    if call.op not in ("aten::view.default", "aten::reshape.default"):
        return None
    joined = made.get(call.args[0].name)
    if joined is None or joined.op != "aten::cat.default" or uses[joined.name] != 1:
        return None
    parts = joined.args[0]
    if joined.module != call.module or not isinstance(parts, tuple):
        return None
    shapes = {kinds[one.name][1] for one in parts if one.name in kinds}
    known = all(isinstance(one, Ref) and one.name in kinds for one in parts)
    if len(shapes) != 1 or not known:
        return None
    (shape,) = shapes
    dim = _dim(joined, len(shape)) if shape else 0
    if not shape or call.result[0][1] != (*shape[:dim], len(parts), *shape[dim:]):
        return None
    return _arguments([*parts], dim)


def _dim(call: Call, ndim: int) -> int:
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return int(dim) % ndim


def _arguments(parts: list[Any], dim: int) -> tuple[Any, ...] | None:
    if len(parts) < 2:
        return None
    return (tuple(parts), dim) if dim else (tuple(parts),)
