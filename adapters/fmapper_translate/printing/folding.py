"""Conditions whose outcome is known before a file is run."""

from __future__ import annotations

import ast
from typing import Any

_MODES = ("deterministic", "inference")  # attributes that are bools


def fold(node: ast.expr) -> ast.expr:
    """Returns a condition or choice without what constants decide."""
    match node:
        case ast.UnaryOp(ast.Not(), ast.Constant(value)):
            return ast.Constant(not value)
        case ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), ast.Attribute(attr=name) as inner)) if (
            name in _MODES
        ):
            return inner  # a bool
        case ast.IfExp(ast.UnaryOp(ast.Not(), test), then, other):
            return ast.IfExp(test, other, then)
        case ast.BoolOp(op, values):
            kept = [item for item in values[:-1] if not _passes(item, op)]
            kept.append(values[-1])
            return kept[0] if len(kept) == 1 else ast.BoolOp(op, kept)
        case ast.Compare(ast.Constant(left), [ast.Is() | ast.Eq()], [ast.Constant(right)]):
            return ast.Constant(left is right or (left == right and type(left) is type(right)))
        case ast.Compare(ast.Constant(left), [ast.IsNot() | ast.NotEq()], [ast.Constant(right)]):
            return ast.Constant(not (left == right and type(left) is type(right)))
        case ast.BinOp(left, ast.Add(), ast.Constant(value)) if type(value) is int and value == 0:
            return left
    return node


def ends(node: ast.expr, op: ast.boolop) -> bool:
    """Returns whether an operand of `and` or `or` is a constant that ends its evaluation."""
    return isinstance(node, ast.Constant) and bool(node.value) is isinstance(op, ast.Or)


def _passes(node: ast.expr, op: ast.boolop) -> bool:
    return isinstance(node, ast.Constant) and not ends(node, op)


def known_test(node: ast.expr) -> bool | None:
    """Returns the outcome of a condition; None if constants do not decide it."""
    match node:
        case ast.Constant(value):
            return bool(value)
        case ast.BoolOp(op, values) if ends(values[-1], op) and all(map(_is_pure, values)):
            return isinstance(op, ast.Or)
    return None


def _is_pure(node: ast.expr) -> bool:
    return not any(isinstance(item, ast.Call | ast.Await) for item in ast.walk(node))


def is_constant(node: ast.expr, *values: Any) -> bool:
    """Returns whether an expression is one of these constants."""
    return isinstance(node, ast.Constant) and any(node.value is value for value in values)
