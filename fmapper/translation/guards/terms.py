"""Sums of products of sizes, and their arithmetic."""

from __future__ import annotations

import ast
import copy
import functools
from collections import Counter
from collections.abc import Mapping
from typing import TypeGuard

Sum = Counter[tuple[str, ...]]  # products of names -> their factors

MOST_TERMS = 100
MOST_STEPS = 50


def multiply(left: Sum, right: Sum) -> Sum:
    """Returns a product of sums as a sum."""
    found: Sum = Counter()
    for names, factor in left.items():
        for others, other in right.items():
            found[(*sorted((*names, *others)),)] += factor * other
    return Counter({names: factor for names, factor in found.items() if factor})


def add(total: Sum, more: Sum, sign: int = 1) -> None:
    """Adds a sum to another one, or subtracts it."""
    for names, factor in more.items():
        total[names] += sign * factor
        if not total[names]:
            del total[names]


def divide(total: Sum, divisor: Sum) -> Sum | None:
    """Returns the sum whose product with another one is a sum; None if there is none.

    Examples:
        >>> a_plus_1 = Counter({("a",): 1, (): 1})
        >>> divide(Counter({("a", "b"): 2, ("b",): 2}), a_plus_1)
        Counter({('b',): 2})
    """
    if not divisor:
        return None
    found: Sum = Counter()
    left, first = Counter(total), first_of(divisor)
    for _ in range(MOST_STEPS):
        if not left:
            return found
        names = first_of(left)
        rest = Counter(names) - Counter(first)
        if Counter(first) - Counter(names) or left[names] % divisor[first]:
            return None
        part: Sum = Counter({(*sorted(rest.elements()),): left[names] // divisor[first]})
        add(found, part)
        add(left, multiply(part, divisor), -1)
    return None


def code_of(terms: Sum, nodes: Mapping[str, ast.expr]) -> ast.expr:
    """Returns a sum as code, with longer products first."""
    found: list[ast.expr] = []
    for names, factor in sorted(terms.items(), key=lambda term: -len(term[0])):
        product = [copy.deepcopy(nodes[one]) for one in names]
        if factor != 1 or not product:
            product.insert(0, _literal(factor))
        found.append(functools.reduce(product_of, product))
    return functools.reduce(lambda a, b: ast.BinOp(a, ast.Add(), b), found or [_literal(0)])


def _literal(value: int) -> ast.expr:
    known = ast.Constant(abs(value))
    return known if value >= 0 else ast.UnaryOp(ast.USub(), known)


def product_of(left: ast.expr, right: ast.expr) -> ast.expr:
    """Returns the code of a product."""
    return ast.BinOp(left, ast.Mult(), right)


def first_of(total: Sum) -> tuple[str, ...]:
    """Returns the product of a sum that comes first in the order of polynomials."""
    return max(total, key=lambda names: (len(names), names))


def is_operation(node: ast.expr, operator: type[ast.operator]) -> TypeGuard[ast.BinOp]:
    """Returns whether code is two operands with an operator between them."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, operator)


def is_square(node: ast.expr) -> TypeGuard[ast.BinOp]:
    """Returns whether code is the square of something."""
    return is_operation(node, ast.Pow) and number(node.right) == 2


def number(node: ast.expr) -> int | None:
    """Returns the whole number that code is; None for other code."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = number(node.operand)
        return None if found is None else -found
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None
