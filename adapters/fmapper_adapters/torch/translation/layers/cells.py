"""Loops that do nothing but call a cell, as the steps of the cell's submodule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fmapper.programs import refs_in
from fmapper.translation import Call, Layer, Ref, Structure, Unit, text
from fmapper_adapters.torch.translation.layers.site import name_of

_ALL = {"slice": (None, None, None)}
_FILLS = ("torch.full", "torch.zeros", "expand")


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop of a cell.

    Attributes:
        unit: The submodule whose steps it is of.
        cell: The call of the cell in it.
        whole: The cell, with the loop as its steps.
        gone: The steps that are not the submodule's then.
        last: The last state, which is the last of the outputs -> the call that gives it.
    """

    unit: Unit
    cell: Unit
    whole: Unit
    gone: Sequence[Call | Unit]
    last: Sequence[Call]


def regroup(structure: Structure, layer_of: Callable[[Unit], Layer | None]) -> None:
    """Makes the loops around cells steps of those, where that is a layer.

    A cell that is called elsewhere too stays one.
    """
    units = [structure.root, *structure.root.units()]
    calls: dict[str, int] = {}
    for unit in units:
        calls[unit.path] = calls.get(unit.path, 0) + 1
    found: dict[str, list[tuple[_Loop, Layer]]] = {}
    for unit in units:
        for step in unit.steps:
            loop = _loop(structure, unit, step) if isinstance(step, Call) else None
            layer = None if loop is None else layer_of(loop.whole)
            if loop is not None and layer is not None:
                found.setdefault(loop.cell.path, []).append((loop, layer))
    for path, loops in found.items():
        if len(loops) == calls[path] and len({text(layer.made) for _, layer in loops}) == 1:
            for loop, _ in loops:
                _replace(structure, loop)


def _replace(structure: Structure, loop: _Loop) -> None:
    steps: list[Call | Unit] = []
    for step in loop.unit.steps:
        if step is loop.cell:
            steps += [loop.whole, *loop.last]
        elif not any(step is one for one in loop.gone):
            steps.append(step)
    loop.unit.steps = steps
    (output,) = loop.whole.gives
    structure.values.setdefault(output, _calls(loop.whole)[-1].result[0])


def _loop(structure: Structure, unit: Unit, begin: Call) -> _Loop | None:
    """Returns the loop that a step begins, if it does nothing but call a cell."""
    if begin.op != "flow::begin" or begin.kwargs["reverse"] or len(begin.args[1]) != 1:
        return None
    own = _calls(unit)
    picks = [call for call in own if _is_pick(call, begin)]
    names = {call.name for call in picks}
    ends = [call for call in own if call.op == "flow::end" and {*refs_in(call.args[0])} == names]
    users = [step for step in unit.steps if step not in picks and names & _refs(step)]
    cells = [step for step in users if isinstance(step, Unit)]
    zeros = _zeros(own, begin.args[0])
    if not ends or [*cells, *ends] != users or len(cells) != 1 or not zeros:
        return None
    (cell,), (end,) = cells, ends
    made = _names(cell)
    outside = [step for step in unit.steps if step not in (cell, end)]
    needed = {*unit.gives}.union(*map(_refs, outside))
    ended = [call for call in own if _is_pick(call, end)]
    rows = _rows(structure, begin, end, [call for call in ended if call.name in needed])
    if rows is None or made & needed:
        return None
    calls = [*zeros, begin, *picks, *cell.calls(), *rows[:2]]
    output, inside = rows[1].name, {call.name for call in calls}
    given = {name: None for call in calls for name in _without_device(call).refs()}
    runs = next((one for one in structure.program.parts if one.name == begin.module), None)
    source = end.source if runs is None or runs.name == unit.name else runs.source
    arguments = {"inputs": begin.args[1][0]}
    part = replace(cell.part, method="", arguments=arguments, result=Ref(output), source=source)
    whole = Unit(cell.name, cell.path, part, [*calls], unit)
    whole.given = [name for name in given if name not in inside and name not in structure.sizes]
    whole.gives = [output]
    left = [step for step in outside if step is not begin and step not in zeros]
    used = {name for step in left for name in _refs(step)}
    for one in reversed(zeros):  # what other loops begin with, too, is made of others
        used |= _refs(one) if one.name in used else set()
    gone = [begin, end, *picks, *ended, *(one for one in zeros if one.name not in used)]
    return _Loop(unit, cell, whole, gone, rows[2])


def _calls(unit: Unit) -> list[Call]:
    return [step for step in unit.steps if isinstance(step, Call)]


def _names(step: Call | Unit) -> set[str]:
    return {step.name} if isinstance(step, Call) else {call.name for call in step.calls()}


def _refs(step: Call | Unit) -> set[str]:
    """Returns what a step computes with; a submodule is also given what it does not use."""
    if isinstance(step, Call):
        return {*step.refs()}
    told = {*refs_in((step.part.arguments,))}
    return told.union(*(call.refs() for call in step.calls()))


def _without_device(call: Call) -> Call:
    """Returns a call without the array whose device a new one gets, which is beside any input."""
    kwargs = {key: value for key, value in call.kwargs.items() if key != "device"}
    return replace(call, kwargs=kwargs)


def _is_pick(call: Call, of: Call) -> bool:
    return call.op == "sym::getitem" and call.args[0] == Ref(of.name)


def _rows(
    structure: Structure, begin: Call, end: Call, picks: Sequence[Call]
) -> tuple[Call, Call, list[Call]] | None:
    """Returns the end of a loop as one with a single output, and what uses that.

    Returns:
        The end, the call that picks the output, and calls that give its last row, which is the
        last state, or the output with its steps in another dimension. None where something else
        is used, as the cell state of an LSTM.
    """
    given, carry, ys = end.args
    states = [call for call in picks if call.args[1] < len(carry)]
    outputs = [call for call in picks if call.args[1] >= len(carry)]
    values = {*ys, *(carry[call.args[1]] for call in states)}
    if len(values) != 1 or len(outputs) > 1:
        return None
    (dim,) = begin.kwargs["dims"]
    stacked = {end.kwargs["dims"][call.args[1] - len(carry)] for call in outputs} - {dim}
    if any(abs(other - dim) != 1 for other in stacked):
        return None
    kwargs = {**end.kwargs, "dims": (dim,)}
    dtype, shape = structure.values[next(iter(values)).name]
    x = structure.values[begin.args[1][0].name][1]
    result = dtype, (*shape[:dim], x[begin.kwargs["dims"][0]], *shape[dim:])
    name = outputs[0].name if outputs and not stacked else f"{end.name}_outputs"
    end = replace(end, args=(given, carry, (*values,)), kwargs=kwargs)
    output = Call(
        name, "sym::getitem", (Ref(end.name), len(carry)), {}, end.module, end.source, (result,)
    )
    index = (_ALL, -1) if dim else -1
    last = [replace(call, op="torch::operator.getitem", args=(Ref(name), index)) for call in states]
    for other in stacked:  # than the dimension that the steps are taken from
        order = (Ref(name), *sorted((dim, other)))
        last.append(replace(outputs[0], op="tensor::transpose", args=order))
    return end, output, last


def _zeros(own: Sequence[Call], carry: Sequence[Any]) -> list[Call]:
    """Returns the calls that make a first state of zeros; none if one is something else."""
    made = {call.name: call for call in own}
    found: dict[str, Call] = {}
    todo = list(carry)
    while todo:
        value = todo.pop()
        call = made.get(value.name) if isinstance(value, Ref) else None
        name = "" if call is None else name_of(call)
        if call is None or name not in _FILLS or (name == "torch.full" and call.args[1] != 0):
            return []
        found[call.name] = call
        todo += [call.args[0]] if name == "expand" else []
    return [*reversed(found.values())]
