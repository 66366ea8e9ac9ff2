"""Conditions on the sizes of a model's inputs: those that its code has to check."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable

from fmapper.programs.program import Guard


def strictest(guards: Iterable[Guard]) -> list[Guard]:
    """Returns conditions without those that always hold, or that others imply."""
    least: dict[str, int] = {}
    for guard in guards:
        if guard.relation == ">=":
            least[guard.expression] = max(guard.value, least.get(guard.expression, guard.value))
    return [
        guard
        for guard in dict.fromkeys(guards)
        if not _always_holds(guard)
        and (guard.relation != ">=" or guard.value == least.pop(guard.expression, None))
    ]


def _always_holds(guard: Guard) -> bool:
    """Returns whether an expression is a multiple of what the value is not."""
    if guard.relation != "!=":
        return False
    try:
        divisor = _divisor(ast.parse(guard.expression, mode="eval").body)
    except SyntaxError:
        return False
    return divisor > 1 and guard.value % divisor != 0


def _divisor(node: ast.expr) -> int:
    """Returns a number that divides the value of an expression of whole numbers.

    Examples:
        >>> _divisor(ast.parse("4*(s + 1)*6 + 16*t", mode="eval").body)
        8
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return abs(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _divisor(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _divisor(node.left), _divisor(node.right)
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Add | ast.Sub):
            return math.gcd(left, right)
    return 1
