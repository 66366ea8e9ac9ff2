"""The arithmetic that constructors do with their numeric arguments."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

Number = int | float

CALLED: dict[str, Callable[..., Any]] = {
    "int": int,
    "max": max,
    "min": min,
    "round": round,
    "abs": abs,
    "float": float,
}
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.Mod: operator.mod,
    ast.USub: operator.neg,
}  # fmt: skip


def names_in_code(code: str) -> list[str]:
    """Returns the variables in the code of a number.

    Examples:
        >>> names_in_code("max(1, width // 4)")
        ['width']
    """
    names = [node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    return [*dict.fromkeys(name for name in names if name not in CALLED)]


def compute(code: str, numbers: Mapping[str, Number]) -> Number | None:
    """Computes a number; None if its code is more than arithmetic with these variables.

    Examples:
        >>> compute("max(1, width // 4)", {"width": 32}), compute("depth + 1", {"width": 32})
        (8, None)
    """

    def visit(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as value):
                return value
            case ast.Name(id=name):
                return numbers[name]
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](visit(left), visit(right))
            case ast.UnaryOp(op=op, operand=operand):
                return _OPERATORS[type(op)](visit(operand))
            case ast.Call(func=ast.Name(name), args=args, keywords=[]):
                return CALLED[name](*map(visit, args))
        raise KeyError(type(node))

    try:
        return number_of(visit(ast.parse(code, mode="eval").body))
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def number_of(value: Any) -> Number | None:
    """Returns a number, or the common value of all items of a tuple; None for others."""
    if isinstance(value, tuple) and value and len({*map(repr, value)}) == 1:
        value = value[0]
    return value if type(value) in (int, float) else None
