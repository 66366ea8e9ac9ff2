"""Drops updates of buffers that return a buffer unchanged."""

from __future__ import annotations

import dataclasses

from fmapper.programs import Program, Ref


def drop_unchanged(program: Program) -> Program:
    """Removes outputs that write a buffer's own value to it, as in `self.x = self.x.to(device)`."""
    graph = program.graph
    buffers = {
        str(given.target): Ref(name)
        for name, given in zip(graph.inputs, program.inputs, strict=True)
        if given.kind == "buffer"
    }
    kept = [
        (value, output)
        for value, output in zip(graph.outputs, program.outputs, strict=True)
        if output.kind != "buffer" or buffers.get(str(output.target)) != value
    ]
    if len(kept) == len(program.outputs):
        return program
    return dataclasses.replace(
        program,
        graph=dataclasses.replace(graph, outputs=tuple(value for value, _ in kept)),
        outputs=tuple(output for _, output in kept),
    )
