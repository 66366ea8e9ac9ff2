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
}


def size_of(expression: str, sizes: Mapping[str, Any]) -> Any | None:
    """What an expression of sizes comes to; None where that is not known.

    Examples:
        >>> size_of("2*s0 + 1", {"s0": 4}), size_of("s1", {"s0": 4}), size_of("f(s0)", {"s0": 4})
        (9, None, None)
    """
    try:
        return _value(ast.parse(expression, mode="eval").body, sizes)
    except (SyntaxError, LookupError, ZeroDivisionError):
        return None


def _value(node: ast.AST, sizes: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, sizes))
    raise LookupError(type(node).__name__)
