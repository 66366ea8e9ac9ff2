"""Folds constants, and drops calls that return an operand unchanged."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fmapper.programs import Call, Graph, Ref, Scalar, substitute
from fmapper_adapters.torch.fuse.graph_index import GraphIndex

_COMPUTED: dict[str, Any] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": max,
    "min": min,
}
_COMPARED: dict[str, Any] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_EXACT = 1 << 24  # integers up to this are exact in float32


def fold(graph: Graph, kinds: Mapping[str, Any], borders: set[str]) -> Graph:
    """Folds calls whose results are known or equal to an operand; `borders` as for `GraphIndex`."""
    index = GraphIndex(graph, kinds, borders=borders)
    values: dict[str, Any] = {}
    calls = []
    for call in graph.calls:
        new = replace(
            call, args=substitute(call.args, values), kwargs=substitute(call.kwargs, values)
        )
        index.reader = new.module
        result = _result(new, index)
        if result is None or isinstance(result, Call):
            new = result or new
            calls.append(new)
            index.calls[new.name] = new
        else:
            values[call.name] = result
            if isinstance(result, Ref):
                index.replace(call.name, result.name)
    return Graph(graph.inputs, calls, substitute(graph.outputs, values), graph.kinds)


def _result(call: Call, index: GraphIndex) -> Any | None:
    name = call.op.removeprefix("lax::")
    args = call.args
    if len(call.result) != 1:
        return None
    dtype, shape = call.result[0]
    if name == "convert_element_type" and isinstance(args[0], Scalar):
        return _convert(args[0], dtype)
    if name == "select_n":
        which = index.number(args[0])
        if which is not None and index.shape(args[1 + int(which)]) == shape:
            return args[1 + int(which)]
        return None
    if len(args) != 2:
        return None
    if all(isinstance(arg, Scalar) for arg in args):
        return _compute(name, args[0].value, args[1].value, dtype)
    return _unchanged_operand(call, name, index, tuple(shape))


def _convert(number: Scalar, dtype: str) -> Scalar | None:
    value = number.value
    if dtype == "bool":
        return Scalar(bool(value), dtype)
    if dtype.startswith("int") and isinstance(value, bool | int):
        return Scalar(int(value), dtype) if abs(value) < 128 else None
    if dtype.startswith("float") and isinstance(value, bool | int):
        return Scalar(float(value), dtype) if abs(value) < 2048 else None
    if dtype == number.dtype or (number.dtype == "float32" and dtype == "float64"):
        return Scalar(value, dtype)
    return None


def _compute(name: str, a: Any, b: Any, dtype: str) -> Scalar | None:
    """Computes a result if that is exact: for small integers, also as floats."""
    if isinstance(a, complex) or isinstance(b, complex):
        return None
    if not all(math.isfinite(x) and abs(x) < 2048 and float(x).is_integer() for x in (a, b)):
        return None
    if name in _COMPARED:
        return Scalar(_COMPARED[name](a, b), "bool")
    if name in _COMPUTED and dtype in ("int32", "int64", "float32", "float64"):
        if name in ("max", "min") and a == b == 0:
            return None  # -0.0 against 0.0
        result = _COMPUTED[name](a, b)
        return Scalar(result, dtype) if abs(result) < _EXACT else None
    return None


def _unchanged_operand(
    call: Call, name: str, index: GraphIndex, shape: tuple[Any, ...]
) -> Any | None:
    """Returns the operand that a call returns unchanged or broadcast."""
    args = call.args
    for value, other, first in ((args[0], args[1], False), (args[1], args[0], True)):
        number = index.number(other)
        if number is None or not _is_neutral(name, number, index.dtype(value), first=first):
            continue
        if index.shape(value) == shape:
            return value
        if len(index.shape(value)) == len(shape):
            dims = {"shape": shape, "broadcast_dimensions": tuple(range(len(shape)))}
            return replace(call, op="lax::broadcast_in_dim", args=(value,), kwargs=dims)
    return None


def _is_neutral(name: str, number: Any, dtype: str, *, first: bool) -> bool:
    """Returns whether an operation with a number, on the left if `first`, changes nothing."""
    if name == "sub":
        return not first and number == 0 and str(number) != "-0.0"
    if name == "add":
        return bool(number == 0) and "int" in dtype
    if name in ("mul", "div"):
        return number == 1 and not isinstance(number, bool) and not (first and name == "div")
    if name in ("and", "or"):
        return number is (name == "and")
    return name in ("max", "min") and number == (math.inf if name == "min" else -math.inf)
