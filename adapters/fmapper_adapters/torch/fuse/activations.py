"""Activation functions that JAX expands: GELU in both forms, SiLU."""

from __future__ import annotations

import math
from typing import Any

from fmapper.programs import Call, Ref
from fmapper_adapters.torch.fuse.graph_index import GraphIndex
from fmapper_adapters.torch.fuse.rewriter import Rewriter


def find(rewriter: Rewriter, call: Call) -> Any | None:
    """Recognises GELU and SiLU among products with x as a factor."""
    if call.op != "lax::mul" or not call.result[0][0].startswith(("float", "bfloat")):
        return None
    index = rewriter.index
    dtype, shape = call.result[0]
    factors = index.factors(Ref(call.name), shape)
    numbers = [n for n in map(index.number, factors) if n is not None]
    values = [f for f in factors if index.number(f) is None]
    if len(values) != 2:
        return None
    for x, gate in (values, values[::-1]):
        op, kwargs = _gate(index, x, gate, numbers)
        if op:
            return rewriter.call(op, x, shape=shape, dtype=dtype, **kwargs)
    return None


def _gate(index: GraphIndex, x: Any, gate: Any, numbers: list[Any]) -> tuple[str, dict[str, Any]]:
    call = index.call(gate)
    if call is None:
        return "", {}
    if call.op == "lax::logistic" and not numbers and call.args[0] == x:
        return "torch::silu", {}
    if not _close(numbers, [0.5]):
        return "", {}
    if call.op == "lax::erfc" and _is_multiple(index, call.args[0], x, -math.sqrt(0.5)):
        return "torch::gelu", {"approximate": "none"}
    if call.op == "lax::add":
        for number, function in (call.args, call.args[::-1]):
            if index.number(number) != 1:
                continue
            inner = index.call(function, "erf", "tanh")
            if inner is None:
                continue
            if inner.op == "lax::erf" and _is_multiple(index, inner.args[0], x, math.sqrt(0.5)):
                return "torch::gelu", {"approximate": "none"}
            if inner.op == "lax::tanh" and _is_cubic(index, inner.args[0], x):
                return "torch::gelu", {"approximate": "tanh"}
    return "", {}


def _is_multiple(index: GraphIndex, value: Any, x: Any, factor: float) -> bool:
    """Returns whether a value is x times a number, which may be a quotient or a negation."""
    sign = 1.0
    call = index.call(value)
    if call is not None and call.op == "lax::div" and call.args[0] == x:
        number = index.number(call.args[1])
        return number is not None and _close([1 / number], [factor])
    product = 1.0
    seen = 0
    for part in index.factors(value, ()):
        negated = index.call(part, "neg")
        inner = negated.args[0] if negated is not None else part
        sign = -1.0 if negated is not None else 1.0
        number = index.number(inner)
        if number is not None:
            product *= sign * number
        elif inner == x:
            product *= sign
            seen += 1
        else:
            return False
    return seen == 1 and _close([product], [factor])


def _is_cubic(index: GraphIndex, value: Any, x: Any) -> bool:
    """Recognises `sqrt(2 / pi) * (x + 0.044715 x**3)`."""
    factors = index.factors(value, ())
    numbers = [n for n in map(index.number, factors) if n is not None]
    values = [f for f in factors if index.number(f) is None]
    if not _close(numbers, [math.sqrt(2 / math.pi)]) or len(values) != 1:
        return False
    total = index.call(values[0], "add")
    if total is None:
        return False
    for a, b in (total.args, total.args[::-1]):
        if a != x:
            continue
        parts = index.factors(b, ())
        constants = [n for n in map(index.number, parts) if n is not None]
        powers = 0
        for part in parts:
            if index.number(part) is not None:
                continue
            power = index.call(part, "integer_pow", "square")
            if part == x:
                powers += 1
            elif power is not None and power.args[0] == x:
                powers += power.kwargs.get("y", 2)
            else:
                return False
        return powers == 3 and _close(constants, [0.044715])
    return False


def _close(numbers: list[Any], wanted: list[float]) -> bool:
    return len(numbers) == len(wanted) and all(
        math.isclose(a, b, rel_tol=1e-6) for a, b in zip(numbers, wanted, strict=True)
    )
