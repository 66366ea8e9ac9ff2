"""Leaves out what repeats elements for an operation that repeats them itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fmapper.programs import Call, Graph, Program, Ref, refs_in

_POINTWISE = frozenset(
    {
        *(f"aten::{name}.Tensor" for name in ("add", "sub", "mul", "div")),
        *(f"aten::{name}.Tensor" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
        *("aten::maximum.default", "aten::minimum.default", "aten::where.self"),
    }
)

Shape = tuple[int | str, ...]


def with_broadcasts(program: Program) -> Program:
    """Gives operations on elements what was expanded to the shape that they have anyway."""
    graph = program.graph
    shapes = _shapes(program)
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
    return replace(program, graph=kept)


def _shapes(program: Program) -> dict[str, Shape]:
    """Returns the shapes of the arrays of a program."""
    inputs = zip(program.graph.inputs, program.inputs, strict=True)
    shapes = {name: one.shape for name, one in inputs if one.is_array()}
    return shapes | {
        call.name: call.result[0][1] for call in program.graph.calls if len(call.result) == 1
    }


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
        found[user.name] = replace(user, args=args)
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
