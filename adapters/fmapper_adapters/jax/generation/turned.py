"""Weights of linear layers, turned so that XLA reads them in order on the CPU.

torch keeps a weight as (out, in). A product of few rows with that is two to three times as slow
there as with (in, out), as long as the weights stay in the cache of the processor. Where each step
reads them from memory, those of torch are a third faster, as long as there is more than one row.
On accelerators it makes no difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from fmapper.programs import Graph, Lowering, Program, Ref
from fmapper_adapters.jax.model.static_program import Arrays, StaticProgram

_LINEAR = "aten::linear.default"
_TURNED = "fmapper::linear_of_turned"
_CACHE = 8 << 20  # bytes of weights that stay in it


def names(programs: Iterable[Program], params: Arrays, batch: int) -> frozenset[str]:
    """Returns the parameters worth transposing: those that only linear layers use."""
    if batch == 1 or any(_platform(array) != "cpu" for array in params.values()):
        return frozenset()
    found: set[str] = set()
    others: set[str] = set()
    for program in programs:
        label_of = {
            label: str(one.target)
            for label, one in zip(program.graph.inputs, program.inputs, strict=True)
            if one.kind == "parameter"
        }
        weights = {
            call.args[1].name
            for call in program.graph.calls
            if call.op == _LINEAR and isinstance(call.args[1], Ref)
        }
        rest = _uses_beside_weights(program.graph)
        for label, name in label_of.items():
            (found if label in weights and label not in rest else others).add(name)
    unused = {name for program in programs for name in _find_unused(program)}
    own = frozenset(n for n in found - (others - unused) if params[n].ndim == 2)
    if sum(params[name].nbytes for name in found if name in params) > _CACHE:
        return frozenset()
    return own


def _platform(array: Any) -> str:
    devices = getattr(array, "devices", None)
    return next(iter(devices())).platform if devices is not None else ""


def _uses_beside_weights(graph: Graph) -> frozenset[str]:
    """Returns the names that a graph uses other than as weights of linear layers."""
    bare = [
        dataclasses.replace(call, args=(call.args[0], None, *call.args[2:]))
        if call.op == _LINEAR
        else call
        for call in graph.calls
    ]
    return Graph(graph.inputs, bare, graph.outputs).uses()


def _find_unused(program: Program) -> set[str]:
    pairs = zip(program.graph.inputs, program.inputs, strict=True)
    return {str(one.target) for label, one in pairs if label not in program.graph.uses()}


def turn(arrays: Arrays, which: frozenset[str]) -> Arrays:
    """Transposes some of the arrays; applying it twice gives the original."""
    turned: Arrays = _transpose({name: arrays[name] for name in which})
    return {name: turned.get(name, array) for name, array in arrays.items()}


@jax.jit
def _transpose(arrays: Arrays) -> Arrays:
    found: Arrays = jax.tree.map(jnp.transpose, arrays)
    return found


def code(own: StaticProgram, which: frozenset[str]) -> StaticProgram:
    """Returns code that runs a program with these weights transposed."""
    program = own.program
    labels = {
        label
        for label, one in zip(program.graph.inputs, program.inputs, strict=True)
        if one.kind == "parameter" and one.target in which
    }
    if not labels:
        return own
    calls = [
        dataclasses.replace(call, op=_TURNED)
        if call.op == _LINEAR and isinstance(call.args[1], Ref) and call.args[1].name in labels
        else call
        for call in program.graph.calls
    ]
    graph = Graph(program.graph.inputs, calls, program.graph.outputs, program.graph.kinds)
    linear = own.lowerings[_LINEAR].function

    def multiply(x: Any, weight: Any, bias: Any = None) -> Any:
        return linear(x, weight.T, bias)

    lowerings = {**own.lowerings, _TURNED: Lowering(multiply)}
    return StaticProgram(dataclasses.replace(program, graph=graph), lowerings, own.constants)
