"""Functions of single elements within a program, computed on whole tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fmapper import ConversionError
from fmapper.programs import Call, Graph, Ref, Scalar
from fmapper_adapters.torch.model.emit import current

# Primitives that combine two elements -> the name of the reduction.
_REDUCTIONS = {"add", "mul", "max", "min", "and", "or", "xor"}


def reduction_of(graph: Graph) -> str | None:
    """Recognises a function of two elements as a single operation: `add`, `max`, ..."""
    if len(graph.calls) != 1 or len(graph.inputs) != 2 or len(graph.outputs) != 1:
        return None
    (call,) = graph.calls
    name = call.op.removeprefix("lax::")
    refs = {arg.name for arg in call.args if isinstance(arg, Ref)}
    if name not in _REDUCTIONS or refs != set(graph.inputs) or graph.outputs[0] != Ref(call.name):
        return None
    return name


def apply(graph: Graph, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Applies a function of elements to tensors of one shape.

    Raises:
        ConversionError: The function has operations that depend on the shape.
    """
    shape = tuple(operands[0].shape)
    calls = [_grow(call, shape) for call in graph.calls]
    kinds = tuple((dtype, shape) for dtype, _ in graph.kinds)
    grown = Graph(graph.inputs, calls, graph.outputs, kinds)
    results = current().inline(grown, operands)
    return tuple(
        result.expand(shape) if isinstance(out, Scalar) else result
        for result, out in zip(results, graph.outputs, strict=True)
    )


def _grow(call: Call, shape: tuple[Any, ...]) -> Call:
    if "shape" in call.kwargs or list(call.graphs()) or call.op == "sym::getitem":
        raise ConversionError(
            f"{call.op} within a function that combines elements; torch has no such loop. Write "
            "the function with arithmetic, comparisons and where"
        )
    result = tuple((dtype, shape) for dtype, _ in call.result)
    return dataclasses.replace(call, result=result)


def larger(x: Any, y: Any) -> Any:
    """Returns the larger of two complex numbers: by real parts, then by imaginary ones."""
    return torch.where(_is_above(x, y), x, y)


def smaller(x: Any, y: Any) -> Any:
    return torch.where(_is_above(y, x), x, y)


def _is_above(x: Any, y: Any) -> Any:
    a, b = torch.real(x), torch.real(y)
    return torch.where(a == b, torch.imag(x) > torch.imag(y), a > b)
