"""Normalisations of batches that are called several times in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fmapper.programs import Call, Graph, Program, Ref, refs_in

_OP = "aten::_native_batch_norm_legit_functional"
_STATISTICS = (3, 4)  # where the arguments and the results of the operation are


def with_shared_statistics(program: Program) -> tuple[Program, frozenset[str]]:
    """Lets each call of a normalisation update the statistics that its module holds.

    In a recording the second call is given what the first has made of them, and a module does not
    hold that. A layer changes what it holds in each call.

    Returns:
        The program for layers, and the names of the statistics that layers have to own.
    """
    calls = program.graph.calls
    makers = {call.name: call for call in calls}
    inputs = zip(program.graph.inputs, program.inputs, strict=True)
    buffers = {name: str(one.target) for name, one in inputs if one.kind == "buffer"}
    held: dict[str, str] = {}  # values between two calls -> the buffer that they are of
    for call in calls:
        for at in _updates(call):
            given = call.args[at]
            if isinstance(given, Ref) and given.name not in buffers:
                held[given.name] = _origin(given, makers, buffers)
    held = {value: origin for value, origin in held.items() if origin}
    others = {
        origin
        for call in calls
        for at, arg in enumerate((*call.args, call.kwargs))
        for value in refs_in((arg,))
        if (origin := held.get(value)) and at not in _updates(call)
    }
    others |= {
        held[value]
        for value, output in zip(program.graph.outputs, program.outputs, strict=True)
        if output.kind == "user"
        for value in refs_in((value,))
        if value in held
    }
    became = {value: Ref(origin) for value, origin in held.items() if origin not in others}
    if not became:
        return program, frozenset()

    def rewrite(call: Call) -> Call:
        at = _updates(call)
        args = [
            became.get(one.name, one) if i in at and isinstance(one, Ref) else one
            for i, one in enumerate(call.args)
        ]
        return replace(call, args=tuple(args)) if args != [*call.args] else call

    shared = frozenset(buffers[one.name] for value, one in became.items() if _is_row(value, makers))
    old = program.graph
    graph = Graph(old.inputs, [*map(rewrite, calls)], old.outputs, old.kinds)
    return replace(program, graph=graph), shared


def _updates(call: Call) -> tuple[int, ...]:
    """Returns which arguments of a call it gives an update of: statistics, or a count."""
    if call.op.startswith(_OP):
        return _STATISTICS
    is_count = call.op == "aten::add.Tensor" and call.args[1:] == (1,)
    return (0,) if is_count and call.result and not call.result[0][1] else ()


def _origin(value: Any, makers: Mapping[str, Call], buffers: Mapping[str, str]) -> str:
    """Returns the buffer that a value is an update of; empty for another value."""
    while isinstance(value, Ref) and value.name not in buffers:
        call = makers.get(value.name)
        if call is None:
            return ""
        at = 0
        if call.op == "sym::getitem" and isinstance(call.args[0], Ref):
            at = call.args[1]
            call = makers.get(call.args[0].name, call)
        if at not in _updates(call):
            return ""
        value = call.args[at]
    return value.name if isinstance(value, Ref) else ""


def _is_row(value: str, makers: Mapping[str, Call]) -> bool:
    return makers[value].op == "sym::getitem"
