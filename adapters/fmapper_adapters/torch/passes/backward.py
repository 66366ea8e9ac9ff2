"""Turns the custom gradients of a module into inner graphs of their calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fmapper.programs import Call, Graph, Ref

_WITH_GRADIENT = "fmapper::with_gradient.default"
_COTANGENT = "fmapper::cotangent.default"


def fold_backward(graph: Graph) -> Graph:
    """Moves each `backward` into an inner graph of its call."""
    if not any(call.op == _WITH_GRADIENT for call in graph.calls):
        return graph
    calls: list[Call] = []
    for call in graph.calls:
        calls.append(_with_inner_graph(call, calls) if call.op == _WITH_GRADIENT else call)
    return Graph(graph.inputs, calls, graph.outputs, graph.kinds)


def _with_inner_graph(call: Call, before: Sequence[Call]) -> Call:
    ys, xs, cotangents, gradients, *more = call.args
    starts = [one.name for one in cotangents]
    results = {one.name for one in ys if one not in xs}  # where kept, they have its gradient
    inside = {*starts, *results}
    for one in before:
        if not inside.isdisjoint(_refs(one)):
            inside.add(one.name)
    needed = {one.name for one in gradients}
    body: list[Call] = []
    for one in reversed(before):
        if one.name in needed and one.name in inside - results and one.op != _COTANGENT:
            body.append(one)
            needed |= _refs(one)
    kept = sorted(needed - inside | needed & results)
    inner = Graph((*starts, *kept), body[::-1], gradients)
    args = ys, xs, inner, tuple(Ref(one) for one in kept), *more
    return dataclasses.replace(call, args=args)


def _refs(call: Call) -> frozenset[str]:
    return Graph((), [call], ()).uses()
