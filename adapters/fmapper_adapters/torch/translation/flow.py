"""Loops and branches of a graph of torch as calls whose functions see the values around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fmapper import ConversionError
from fmapper.programs import Call, Graph, Ref, map_arguments, refs_in
from fmapper_adapters.torch.model import control_flow, derivatives

_ENDS = {control_flow.loop_begin: "flow::begin", control_flow.loop_end: "flow::end"}
_SCANS = (control_flow.scan, control_flow.lstm, control_flow.gru)


def is_flow(target: Any) -> bool:
    """Returns whether a function runs a loop, branches, or another function that can be written."""
    known = (control_flow.while_loop, control_flow.switch, derivatives.call_with_derivative)
    return target in (*_SCANS, *_ENDS, *known)


def call_of_flow(node: Any, plain: Callable[[Any], Any], inner: Sequence[Graph]) -> Call:
    """Returns a loop or branch as a call, closed as yet: its functions take all that they need.

    Args:
        node: Calls one of the functions of `is_flow`.
        plain: Makes arguments of a node those of a call.
        inner: The functions that it runs.

    Raises:
        ConversionError: It is a loop for each element alone.
    """
    if node.target in _ENDS:
        return Call("", _ENDS[node.target], plain(tuple(node.args)), plain(dict(node.kwargs)))
    if node.target is derivatives.call_with_derivative:
        return _call_with_derivative(node, plain(tuple(node.args[2])), inner)
    if node.target in _SCANS:
        constants, carry, xs = plain(tuple(node.args[1:]))
        kwargs = {"length": plain(node.kwargs["length"]), "reverse": node.kwargs["reverse"]}
        return Call("", "flow::scan", (inner[0], constants, carry, xs), kwargs)
    if node.target is control_flow.while_loop:
        (holds,) = inner[0].outputs
        known = {one.name: one.result for one in inner[0].calls}
        if isinstance(holds, Ref) and known.get(holds.name, (("", ()),))[0][1]:
            raise ConversionError(
                "a loop that ends separately for each element cannot be translated yet"
            )
        given = plain(tuple(node.args[2:]))
        return Call("", "flow::while", (*inner, *given))
    index, _, operands = node.args
    return Call("", "flow::branch", (plain(index), tuple(inner), plain(tuple(operands))))


def _call_with_derivative(node: Any, operands: Any, inner: Sequence[Graph]) -> Call:
    """Returns the call of a function with a derivative of its own.

    Its graphs are those of the function and of the derivative, or why there is none; with the
    operands that each takes, by position.
    """
    own, more = node.kwargs.get("constants", (0, 0))
    count = len(operands) - own - more
    operands = (*operands[own + more :], *operands[: own + more])
    takes = (*range(count, count + own), *range(count))
    needs = (*range(count + own, count + own + more), *range(count))
    once = [operands.index(one) for one in operands]
    body, takes = _with_inputs_once(inner[0], [once[i] for i in takes])
    backward: Graph | str = str(node.args[1])
    differentiable = [once[i] for i in node.kwargs["differentiable"]]
    if len(inner) > 1:
        backward, needs = _with_inputs_once(inner[1], [once[i] for i in needs])
        backward, differentiable = _with_sums(backward, differentiable)
    kwargs = {
        "takes": takes,
        "needs": needs,
        "differentiable": tuple(dict.fromkeys(differentiable)),
        "cotangents": tuple(node.kwargs["cotangents"]),
        "name": str(node.meta.get("function", "")),
        "once": "once" in node.kwargs,
    }
    return Call("", "call::derivative", (_with_views(body), backward, operands), kwargs)


def _with_inputs_once(graph: Graph, places: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """Returns a graph that takes each operand once, and the operands that it takes.

    Args:
        graph: The graph; it may have further inputs.
        places: The operand of each input.
    """
    first: dict[int, str] = {}
    known = {}
    for name, at in zip(graph.inputs, places, strict=False):
        if first.setdefault(at, name) != name:
            known[name] = Ref(first[at])
    kept = [i for i, name in enumerate(graph.inputs) if name not in known]
    found = _with(graph, known)
    inputs, kinds = tuple(graph.inputs[i] for i in kept), tuple(graph.kinds[i] for i in kept)
    return Graph(inputs, found.calls, found.outputs, kinds), tuple(first)


def _with_sums(graph: Graph, places: Sequence[int]) -> tuple[Graph, list[int]]:
    """Returns a graph that gives one gradient for each operand, and the operands.

    Args:
        graph: The graph.
        places: The operand of each gradient that it gives.
    """
    calls = list(graph.calls)
    made = {call.name: call for call in calls}
    found: dict[int, Any] = {}
    for at, value in zip(places, graph.outputs, strict=True):
        before = found.get(at)
        if before is None or _is_zero(before, made):
            found[at] = value
        elif not _is_zero(value, made):
            name = f"{value.name}_total"
            result = made[value.name].result if value.name in made else ()
            made[name] = Call(name, "torch::operator.add", (before, value), {}, result=result)
            calls.append(made[name])
            found[at] = Ref(name)
    return Graph(graph.inputs, calls, tuple(found.values()), graph.kinds), list(found)


def _is_zero(value: Any, made: Mapping[str, Call]) -> bool:
    call = made.get(value.name) if isinstance(value, Ref) else None
    return call is not None and call.op == "torch::torch.full" and call.args[1] == 0


def _with_views(graph: Graph) -> Graph:
    """Returns a graph of whose results none is an input, or there twice, but a view of it."""
    calls, outputs = list(graph.calls), []
    kinds = dict(zip(graph.inputs, graph.kinds, strict=True))
    kinds |= {call.name: call.result[0] for call in calls if len(call.result) == 1}
    taken = {*graph.inputs}
    for value in graph.outputs:
        if isinstance(value, Ref) and value.name in taken:
            name = f"{value.name}_seen_{len(calls)}"
            kind = (kinds[value.name],) if value.name in kinds else ()
            calls.append(Call(name, "tensor::view_as", (value, value), {}, result=kind))
            outputs.append(Ref(name))
            continue
        if isinstance(value, Ref):
            taken.add(value.name)
        outputs.append(value)
    return Graph(graph.inputs, calls, tuple(outputs), graph.kinds)


def open_call(found: Call) -> Call:
    """Returns a call with what its loop or branch does not change as the values around it."""
    if found.op == "flow::scan":
        body, constants, carry, xs = found.args
        args: tuple[Any, ...] = (_open(body, constants), carry, xs)
    elif found.op == "flow::while":
        condition, body, first, second, carry = found.args
        args = (_open(condition, first), _open(body, second), carry)
    elif found.op == "flow::branch":
        index, branches, operands = found.args
        args = (index, tuple(_open(branch, operands) for branch in branches))
    elif found.op == "call::derivative":
        args = tuple(_open(one, ()) if isinstance(one, Graph) else one for one in found.args)
    else:
        return found
    return dataclasses.replace(found, args=args)


def without_dead_carries(graph: Graph) -> Graph:
    """Returns a graph whose loops carry nothing that only the next value of itself reads."""
    kept = {
        call.name: _find_living(call, _picks(graph, call.name))
        for call in graph.calls
        if call.op == "flow::scan"
    }
    calls = []
    for call in graph.calls:
        if call.name in kept:
            calls.append(_with_carries(call, kept[call.name]))
        elif call.op == "sym::getitem" and call.args[0].name in kept:
            source, at = call.args
            places = kept[source.name]
            calls.append(dataclasses.replace(call, args=(source, places.index(at))))
        else:
            calls.append(call)
    return Graph(graph.inputs, calls, graph.outputs, graph.kinds)


def _picks(graph: Graph, name: str) -> set[int] | None:
    """Returns which results of a call are read; None where something reads all of them."""
    picks = {one.args[1] for one in graph.calls
             if one.op == "sym::getitem" and one.args[0] == Ref(name)}  # fmt: skip
    readers = [one for one in graph.calls if one.op != "sym::getitem" and name in one.refs()]
    return None if readers or name in refs_in(graph.outputs) else picks


def _find_living(call: Call, picks: set[int] | None) -> list[int]:
    """Returns the results of a loop that are read, or that others in it depend on.

    All of them where it needs all that it carries.
    """
    body, constants, carry, _ = call.args
    every = [*range(len(body.outputs))]
    if picks is None:
        return every
    carried = body.inputs[len(constants) : len(constants) + len(carry)]
    made = {one.name: one for one in body.calls}
    living = picks
    while True:
        todo, read = [*refs_in(tuple(body.outputs[i] for i in living))], set[str]()
        while todo:
            name = todo.pop()
            if name not in read:
                read.add(name)
                todo += made[name].refs() if name in made else ()
        found = living | {i for i, name in enumerate(carried) if name in read}
        if found == living:
            return sorted(living) if not living >= {*every[: len(carry)]} else every
        living = found


def _with_carries(call: Call, kept: Sequence[int]) -> Call:
    """Returns a loop with some of its results; those that it lacks are carries."""
    body, constants, carry, xs = call.args
    first = len(constants)
    dropped = {first + i for i in range(len(carry)) if i not in kept}
    if not dropped:
        return call
    inner = Graph(
        tuple(name for i, name in enumerate(body.inputs) if i not in dropped),
        body.calls,
        tuple(body.outputs[i] for i in kept),
        tuple(kind for i, kind in enumerate(body.kinds) if i not in dropped),
    ).without_dead_calls(lambda _: False)
    carry = tuple(one for i, one in enumerate(carry) if i in kept)
    result = tuple(call.result[i] for i in kept)
    return dataclasses.replace(call, args=(inner, constants, carry, xs), result=result)


def _open(graph: Graph, constants: Sequence[Any]) -> Graph:
    """Returns a graph whose first inputs are values from outside."""
    count = len(constants)
    known = dict(zip(graph.inputs, constants, strict=False))
    inner = _with(graph, known)
    calls = [open_call(one) for one in inner.calls]
    return Graph(graph.inputs[count:], calls, inner.outputs, graph.kinds[count:])


def _with(graph: Graph, known: Mapping[str, Any]) -> Graph:
    """Returns a graph with other values in the places of some, those within it too.

    No two values have the same name.
    """

    def change(value: Any) -> Any:
        if isinstance(value, Ref):
            return known.get(value.name, value)
        return _with(value, known) if isinstance(value, Graph) else value

    calls = [
        dataclasses.replace(
            one, args=map_arguments(one.args, change), kwargs=map_arguments(one.kwargs, change)
        )
        for one in graph.calls
    ]
    return Graph(graph.inputs, calls, map_arguments(graph.outputs, change), graph.kinds)
