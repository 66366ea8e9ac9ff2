"""Runs the passes over a program with recorded submodules."""

from __future__ import annotations

import dataclasses

from fmapper.programs import Graph, Output, Program, Ref, refs_in, substitute
from fmapper_adapters.torch.from_fx.conditions import with_plain_conditions
from fmapper_adapters.torch.passes import order

_EFFECTS = ("aten::_assert", "aten::_print")


def with_parts(program: Program, run: order.Pass) -> Program:
    """Runs the passes while keeping track of the arguments and results of parts.

    Meanwhile, the values that the parts refer to are results of the program, which passes keep.
    """
    graph = program.graph
    there = {*graph.inputs, *(call.name for call in graph.calls)}
    parts = [(part.arguments, part.result) for part in program.parts]
    names = [name for name in dict.fromkeys(refs_in(tuple(parts))) if name in there]
    kept = [*program.outputs, *(Output("user", -1) for _ in names)]
    outputs = (*graph.outputs, *map(Ref, names))
    wider = dataclasses.replace(
        program,
        graph=Graph(graph.inputs, graph.calls, outputs, graph.kinds),
        outputs=tuple(kept),
    )
    done = run(wider)
    count = len(done.graph.outputs) - len(names)
    became = dict(zip(names, done.graph.outputs[count:], strict=True))
    done.parts = tuple(
        dataclasses.replace(
            part,
            arguments=substitute(part.arguments, became),
            result=substitute(part.result, became),
        )
        for part in program.parts
    )
    given = set(refs_in(tuple(part.result for part in done.parts)))
    done.graph = Graph(
        done.graph.inputs, done.graph.calls, done.graph.outputs[:count], done.graph.kinds
    ).without_dead_calls(lambda call: call.op.startswith(_EFFECTS) or call.name in given)
    done.outputs = done.outputs[:count]
    return with_plain_conditions(done)
