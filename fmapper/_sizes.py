"""Sizes that are worked out from others, such as `2*s0 + 1`, read without running them as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Pow: operator.pow,
}


def _most(a: Any, b: Any) -> Any:
    """The larger of two sizes; those that are not known yet are asked by arithmetic alone."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return (a + b + abs(a - b)) // 2


def _least(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return (a + b - abs(a - b)) // 2


# As JAX prints what it cannot write with operators.
_FUNCTIONS: dict[str, Any] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": _most,
    "min": _least,
}


def size_of(expression: str, sizes: Mapping[str, Any]) -> Any | None:
    """What an expression of sizes comes to; None where that is not known.

    Examples:
        >>> size_of("2*s0 + 1", {"s0": 4}), size_of("s1", {"s0": 4}), size_of("f(s0)", {"s0": 4})
        (9, None, None)
        >>> size_of("max(floordiv(b, 2) - 1, 0) + 2^2", {"b": 7})
        6
    """
    try:
        # JAX prints powers with a hat, which binds looser than a sum in Python
        return _value(ast.parse(expression.replace("^", "**"), mode="eval").body, sizes)
    except (SyntaxError, LookupError, ZeroDivisionError):
        return None


def _value(node: ast.AST, sizes: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
        first, second = (_value(arg, sizes) for arg in node.args)
        return _FUNCTIONS[node.func.id](first, second)
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, sizes))
    raise LookupError(type(node).__name__)
