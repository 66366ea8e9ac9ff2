"""Conditions on the sizes of a model's inputs: those that its code has to check."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable
from dataclasses import replace

from fmapper.programs.program import Guard
from fmapper.translation.code import expr, text


def strictest(guards: Iterable[Guard]) -> list[Guard]:
    """Returns conditions without those that always hold, or that others imply."""
    least: dict[str, int] = {}
    for guard in guards:
        if guard.relation == ">=":
            least[guard.expression] = max(guard.value, least.get(guard.expression, guard.value))
    found = [
        guard
        for guard in dict.fromkeys(guards)
        if not _always_holds(guard)
        and (guard.relation != ">=" or guard.value == least.pop(guard.expression, None))
    ]
    return [one for guard in found if (one := _as_equality(guard, found)) is not None]


def _as_equality(guard: Guard, guards: list[Guard]) -> Guard | None:
    """Returns `==` for a `>=` whose `<=` is there, too, and None for the latter."""
    other = {">=": "<=", "<=": ">="}.get(guard.relation, "")
    key = (guard.expression, guard.value, other)
    if all((one.expression, one.value, one.relation) != key for one in guards):
        return guard
    return replace(guard, relation="==", question="") if guard.relation == ">=" else None


def condition_of(size: ast.expr, guard: Guard) -> ast.expr:
    """Returns a condition as code, with what is subtracted on its other side.

    Examples:
        >>> guard = Guard("a - b", "==", 0, "")
        >>> ast.unparse(condition_of(expr("x.shape[0] + -1 * y.shape[1]"), guard))
        'x.shape[0] == y.shape[1]'
    """
    more: list[ast.expr] = []
    less: list[ast.expr] = []
    _sort_terms(size, more, less)
    if not more or not less:
        return expr(f"{{0}} {guard.relation} {{1}}", size, guard.value)
    left, right = _sum(more), _sum(less)
    if guard.value:
        right = expr("{0} + {1}", right, guard.value)
    return expr(f"{{0}} {guard.relation} {{1}}", left, right)


def _sort_terms(node: ast.expr, more: list[ast.expr], less: list[ast.expr]) -> None:
    """Sorts the terms of a sum into those that are added and those that are subtracted."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        _sort_terms(node.left, more, less)
        turned = isinstance(node.op, ast.Sub)
        _sort_terms(node.right, less if turned else more, more if turned else less)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        less.append(node.operand)
    elif isinstance(node, ast.BinOp) and text(node.left) == "-1" and isinstance(node.op, ast.Mult):
        less.append(node.right)
    else:
        more.append(node)


def _sum(terms: list[ast.expr]) -> ast.expr:
    total = terms[0]
    for term in terms[1:]:
        total = expr("{0} + {1}", total, term)
    return total


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
