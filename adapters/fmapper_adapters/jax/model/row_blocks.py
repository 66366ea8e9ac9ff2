"""Finds where a program sorts the rows of a batch into groups, and lets each part sort its own.

A mixture of experts sorts all rows by expert. On a mesh whose axes divide the batch XLA sends all
rows to all devices for that, and each computes all experts for all of them. Nothing in such a
program depends on the order of rows of one part of the batch relative to those of another, so the
calls from sorting to restoring the order become one call, which runs separately for each part.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from fmapper.programs import Call, Graph, Program, Ref
from fmapper_adapters.jax.aten import routing
from fmapper_adapters.jax.aten.routing import Kind, Sorted, Step


def with_row_blocks(program: Program, is_random: Mapping[str, bool]) -> Graph:
    """Returns the graph of a program, in which parts of the batch are sorted separately.

    Args:
        program: The program.
        is_random: Whether an operation draws numbers, which would be the same for each part.
    """
    graph = program.graph
    shapes = {name: shape for name, (_, shape) in program.kinds().items()}
    facts = Sorted("", {call.name: call for call in graph.calls}, shapes)
    candidates = (_span(graph, facts, is_random, at) for at in range(len(graph.calls)))
    spans = [span for span in candidates if span is not None]
    if not spans:
        return graph
    inner = {name for span in spans for name in span[0]}
    blocks = {block.name: block for _, block in spans}
    new = [
        blocks.get(call.name, call)
        for call in graph.calls
        if call.name not in inner or call.name in blocks
    ]
    return Graph(graph.inputs, new, graph.outputs, graph.kinds)


class _Span:
    """The calls that depend on an order, up to the one that puts the rows back.

    Args:
        facts: Facts about the program.
    """

    def __init__(self, facts: Sorted) -> None:
        self._facts = facts
        self._several: dict[str, tuple[Kind, ...]] = {}
        self._divided: dict[str, int] = {}
        self._whole: set[str] = set()
        self._calls: list[Call] = []
        self._last: Call | None = None

    def depends(self, call: Call) -> bool:
        """Returns whether a call depends on the order."""
        return any(name in self._facts.kinds or name in self._several for name in call.refs())

    def step(self, call: Call) -> Step | None:
        """Returns what a call does with the rows; None if they cannot be divided there."""
        if call.op == "sym::getitem":
            source, at = call.args
            return Step(self._several[source.name][at])
        rule = routing.rule_of(call.op)
        try:
            return rule and rule(self._facts, call)
        except (IndexError, TypeError, ValueError):  # a form that the rule does not know
            return None

    def add(self, call: Call, step: Step) -> bool:
        """Adds a call; returns False if it does not fit those before."""
        if isinstance(step.kind, tuple):
            self._several[call.name] = step.kind
        elif step.kind is not Kind.RESULT:
            self._facts.kinds[call.name] = step.kind
        elif self._last is None:
            self._last = call
        else:
            return False
        if any(self._divided.get(name, k) != k for name, k in step.divided.items()):
            return False
        self._divided |= step.divided
        added = step.call or call
        self._whole.update(set(added.refs()) - step.divided.keys())
        self._calls.append(added)
        return True

    def block(self, graph: Graph) -> Call | None:
        """Returns one call that replaces these; None if there is none."""
        last, inner = self._last, {call.name for call in self._calls}
        if last is None:
            return None
        whole = sorted(self._whole - inner)
        at = graph.calls.index(last)
        before = {*graph.inputs, *(call.name for call in graph.calls[:at])}
        if not {*self._divided, *whole} <= before or self._divided.keys() & {*whole}:
            return None
        if (inner - {last.name}) & {ref.name for ref in graph.outputs if isinstance(ref, Ref)}:
            return None
        parts = inner | self._divided.keys()
        calls = [_in_each_block(call, parts) for call in self._calls]
        body = Graph((*self._divided, *whole), calls, Ref(last.name))
        args = (body, tuple(map(Ref, self._divided)), (*self._divided.values(),),
                tuple(map(Ref, whole)))  # fmt: skip
        return replace(last, op="fmapper::in_blocks", args=args, kwargs={})

    def names(self) -> set[str]:
        """Returns the names of the calls."""
        return {call.name for call in self._calls}


def _in_each_block(call: Call, parts: Set[str]) -> Call:
    """Returns a call that runs separately for each part of its operands."""
    if call.op in ("sym::getitem", "fmapper::grouped_mm_in_blocks"):  # these take all parts
        return call
    names = [*dict.fromkeys(call.refs())]
    divided, others = [n for n in names if n in parts], [n for n in names if n not in parts]
    body = Graph((*divided, *others), [call], Ref(call.name))
    args = (body, tuple(map(Ref, divided)), tuple(map(Ref, others)))
    return replace(call, op="fmapper::in_each_block", args=args, kwargs={})


def _span(
    graph: Graph, facts: Sorted, is_random: Mapping[str, bool], start: int
) -> tuple[set[str], Call] | None:
    """Returns the names of the calls that depend on a sort, and the call that replaces them."""
    first = graph.calls[start]
    step = routing.starts(first)
    if step is None:
        return None
    span = _Span(replace(facts, rows=first.result[0][1][0], kinds={}, repeats={}))
    if not span.add(first, step):
        return None
    for call in graph.calls[start + 1 :]:
        if span.depends(call):
            next_step = None if is_random[call.op] else span.step(call)
            if next_step is None or not span.add(call, next_step):
                return None
    block = span.block(graph)
    return None if block is None else (span.names(), block)
