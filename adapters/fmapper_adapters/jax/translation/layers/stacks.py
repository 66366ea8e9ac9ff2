"""Arrays that are stacked or repeated, in one operation as in the model's own code."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fmapper.programs import Call, Graph, Program, Ref, refs_in

Kinds = Mapping[str, tuple[str, tuple[Any, ...]]]
Shape = tuple[int | str, ...]

_POINTWISE = frozenset(
    {
        *(f"aten::{name}.Tensor" for name in ("add", "sub", "mul", "div")),
        *(f"aten::{name}.Tensor" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
        *("aten::maximum.default", "aten::minimum.default", "aten::where.self"),
    }
)


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
    kinds = program.kinds()
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


def with_broadcasts(program: Program) -> Program:
    """Gives operations on elements what was expanded to the shape that they have anyway."""
    graph = program.graph
    shapes = {name: shape for name, (_, shape) in program.kinds().items()}
    shared = {*refs_in((graph.outputs, tuple((p.arguments, p.result) for p in program.parts)))}
    users: dict[str, list[str]] = {}
    for call in graph.calls:
        for name in {*call.refs()}:
            users.setdefault(name, []).append(call.name)
    calls = {call.name: call for call in graph.calls}
    for call in graph.calls:
        if not call.op.startswith("aten::expand.") or call.name in shared:
            continue
        found = _without(call, [calls[name] for name in users.get(call.name, ())], shapes)
        if found:
            del calls[call.name]
            calls |= found
    if len(calls) == len(graph.calls):
        return program
    kept = Graph(graph.inputs, [*calls.values()], graph.outputs, graph.kinds)
    return dataclasses.replace(program, graph=kept)


def _without(
    expand: Call, users: Sequence[Call], shapes: Mapping[str, Shape]
) -> dict[str, Call] | None:
    """Returns the users of an expanded array with the array itself, if all can have that."""
    source = expand.args[0]
    if not isinstance(source, Ref) or not shapes.get(source.name):  # a scalar has another dtype
        return None
    found = {}
    for user in users:
        args = tuple(source if one == Ref(expand.name) else one for one in user.args)
        others = [shapes.get(one.name) for one in args if isinstance(one, Ref)]
        whole = user.result[0][1] if len(user.result) == 1 else None
        if user.op not in _POINTWISE or user.kwargs or whole is None or _joint(others) != whole:
            return None
        found[user.name] = dataclasses.replace(user, args=args)
    return found


def _joint(shapes: Sequence[Shape | None]) -> Shape | None:
    """Returns the shape of an operation on the elements of arrays, if that is known."""
    dims: list[int | str] = []
    for shape in shapes:
        if shape is None:
            return None
        dims[:0] = [1] * (len(shape) - len(dims))
        for at, size in enumerate(reversed(shape), 1):
            if size not in (1, dims[-at]) and dims[-at] != 1:
                return None
            dims[-at] = size if dims[-at] == 1 else dims[-at]
    return tuple(dims)
