"""Conditions on the sizes of a model's inputs: those that its code has to check."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fmapper.programs.program import Guard
from fmapper.translation.code import expr, text


def strictest(guards: Iterable[Guard]) -> list[Guard]:
    """Returns conditions without those that always hold, or that others imply."""
    told = [_reduce(guard) for guard in dict.fromkeys(guards)]
    least: dict[str, int] = {}
    for guard in told:
        if guard.relation == ">=":
            least[guard.expression] = max(guard.value, least.get(guard.expression, guard.value))
    sizes = {name: value for name, value in least.items() if name.isidentifier()}
    by_condition = {(one.expression, one.relation, one.value): one for one in reversed(told)}
    found = [
        guard
        for key, guard in reversed(by_condition.items())
        if not _always_holds(guard)
        and not _is_implied(guard, sizes)
        and (guard.relation != ">=" or guard.value == least[guard.expression])
    ]
    return [one for guard in found if (one := _as_equality(guard, found)) is not None]


def _reduce(guard: Guard) -> Guard:
    """Returns a condition on a simpler expression: `n >= 33` for `(n - 1)//32 + 1 >= 2`."""
    node = _parse(guard.expression)
    relation, value, is_reduced = guard.relation, guard.value, False
    while isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.Add) and (left is None) != (right is None):
            value -= right if left is None else left  # type: ignore[operator]
        elif isinstance(node.op, ast.Sub) and right is not None and left is None:
            value += right
        elif (
            isinstance(node.op, ast.FloorDiv)
            and right is not None
            and right > 0
            and left is None
            and relation in (">=", "<=")
        ):
            value = value * right + (right - 1) * (relation == "<=")
        elif isinstance(node.op, ast.Mult) and left is not None and left > 0 and right is None:
            if relation == ">=":
                value = -(-value // left)
            elif relation == "<=" or value % left == 0:
                value //= left
            else:
                break
            node, is_reduced = node.right, True
            continue
        else:
            break
        node, is_reduced = node.right if right is None else node.left, True
    return Guard(text(node), relation, value) if is_reduced else guard


def _parse(expression: str) -> ast.expr:
    """Returns an expression of sizes as code, with the functions in it that are operators."""
    try:
        return _Operators().visit(ast.parse(expression.replace("^", "**"), mode="eval").body)  # type: ignore[no-any-return]
    except SyntaxError:
        return ast.Constant(expression)


class _Operators(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if text(node.func) == "floordiv" and len(node.args) == 2:
            return ast.BinOp(node.args[0], ast.FloorDiv(), node.args[1])
        return node


def _number(node: ast.expr) -> int | None:
    """Returns the whole number that code is; None for other code."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = _number(node.operand)
        return None if found is None else -found
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _is_implied(guard: Guard, sizes: Mapping[str, int]) -> bool:
    """Returns whether a condition on several sizes holds where each is as large as it has to be."""
    if guard.relation != ">=" or guard.expression.isidentifier():
        return False
    least = _least(_parse(guard.expression), sizes)
    return least is not None and least >= guard.value


def _least(node: ast.expr, sizes: Mapping[str, int]) -> int | None:
    """Returns the least value of an expression that grows with its sizes; None for another."""
    known = _number(node)
    if known is not None:
        return known
    if isinstance(node, ast.Name):
        return sizes.get(node.id)
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _least(node.left, sizes), _least(node.right, sizes)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Mult) and left >= 0 and right >= 0:
        return left * right
    if isinstance(node.op, ast.Sub) and _number(node.right) is not None:
        return left - right
    if isinstance(node.op, ast.FloorDiv) and (_number(node.right) or 0) > 0:
        return left // right
    return None


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
