"""Loops whose iterations call parts, and branches that hold arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from fmapper.programs import Graph
from fmapper_adapters.jax.record.equations import plain

Read = Callable[[Any, list[Any]], Sequence[Any]]


def calls_parts(eqn: Any, mark: str) -> bool:
    """Returns whether an equation is a loop whose steps call parts.

    Args:
        eqn: The equation.
        mark: The name of the primitive that marks calls of parts.
    """
    is_loop = eqn.primitive.name == "scan" and eqn.params["length"] != 0
    return is_loop and _is_marked(eqn.params["jaxpr"].jaxpr, mark)


def _is_marked(jaxpr: Any, mark: str) -> bool:
    return any(
        eqn.primitive.name == mark or any(_is_marked(inner, mark) for inner in inner_of(eqn))
        for eqn in jaxpr.eqns
    )


def inner_of(eqn: Any) -> list[Any]:
    """Returns the jaxprs that an equation runs."""
    several = [v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values()]
    jaxprs = [getattr(value, "jaxpr", value) for values in several for value in values]
    return [jaxpr for jaxpr in jaxprs if isinstance(jaxpr, core.Jaxpr)]


def read_step(
    eqn: Any, args: Sequence[Any], counts: tuple[int, int], length: Any,
    emit: Callable[..., Sequence[Any]], read: Read,
) -> Sequence[Any]:  # fmt: skip
    """Reads one step of a scan between a call that begins it and one that ends it.

    `loop_begin` takes the first carry and the arrays of rows, and returns the carry and the rows of
    a step; `loop_end` takes these, the next carry and the rows that the step returns, and returns
    the results of the scan.

    Args:
        eqn: The scan.
        args: Its operands.
        counts: The numbers of constants and of carried values among them.
        length: The number of steps, as plain data.
        emit: Adds a call, and returns its results.
        read: Reads a jaxpr with operands.
    """
    first = sum(counts)
    carry, xs = tuple(args[counts[0] : first]), tuple(args[first:])
    options = {"length": length, "reverse": eqn.params["reverse"]}
    body = eqn.params["jaxpr"]
    kinds = [plain.kind(var.aval) for var in body.jaxpr.invars[counts[0] :]]
    given = tuple(emit("loop_begin", (carry, xs), options, kinds))
    outputs = tuple(read(body, [*args[: counts[0]], *given]))
    results = [plain.kind(var.aval) for var in eqn.outvars]
    after = given, outputs[: counts[1]], outputs[counts[1] :]
    return emit("loop_end", after, options, results)


def with_all(branches: tuple[Graph, ...], counts: list[int]) -> tuple[Graph, ...]:
    """Extends the inputs of each branch by the arrays of the others, so that all take the same."""
    result = []
    for at, branch in enumerate(branches):
        names: list[str] = []
        kinds: list[Any] = []
        for other, count in enumerate(counts):
            part = branches[other]
            held = part.inputs[:count]
            names += held if other == at else [f"{name}_of_{other}" for name in held]
            kinds += part.kinds[:count]
        count = counts[at]
        inputs = (*names, *branch.inputs[count:])
        result.append(Graph(inputs, branch.calls, branch.outputs, (*kinds, *branch.kinds[count:])))
    return tuple(result)
