"""Loops and branches of a graph of torch as calls whose functions see the values around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fmapper import ConversionError
from fmapper.programs import Call, Graph, Ref, map_arguments
from fmapper_adapters.torch.model import control_flow

_ENDS = {control_flow.loop_begin: "flow::begin", control_flow.loop_end: "flow::end"}
_SCANS = (control_flow.scan, control_flow.lstm, control_flow.gru)


def is_flow(target: Any) -> bool:
    """Returns whether a function runs a loop or branches that can be written."""
    return target in (*_SCANS, *_ENDS, control_flow.while_loop, control_flow.switch)


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
    else:
        return found
    return dataclasses.replace(found, args=args)


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
