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
    starts = [ref.name for ref in cotangents]
    results = {x.name for x in ys if x not in xs}  # where kept, they have its gradient
    inside = {*starts, *results}
    for earlier in before:
        if not inside.isdisjoint(_refs(earlier)):
            inside.add(earlier.name)
    needed = {gradient.name for gradient in gradients}
    body: list[Call] = []
    for earlier in reversed(before):
        if earlier.name in needed and earlier.name in inside - results and earlier.op != _COTANGENT:
            body.append(earlier)
            needed |= _refs(earlier)
    kept = sorted(needed - inside | needed & results)
    inner = Graph((*starts, *kept), body[::-1], gradients)
    args = ys, xs, inner, tuple(Ref(name) for name in kept), *more
    return dataclasses.replace(call, args=args)


def _refs(call: Call) -> frozenset[str]:
    return Graph((), [call], ()).uses()
