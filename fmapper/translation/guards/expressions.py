"""Expressions of sizes as Python's code, and what is the same for equal ones."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator


def parse(expression: str) -> ast.expr:
    """Returns an expression of sizes as code, with the functions in it that are operators.

    Examples:
        >>> ast.unparse(parse("FloorDiv(n + m*n - 1, n)"))  # how many steps of n there are
        'm'
    """
    try:
        tree: ast.expr = _Operators().visit(ast.parse(python(expression), mode="eval").body)
    except SyntaxError:
        return ast.Constant(expression)
    return tree


class _Operators(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        sign = _OPERATORS.get(ast.unparse(node.func))
        if sign is None or len(node.args) != 2:
            return node
        made = ast.BinOp(node.args[0], ast.FloorDiv() if sign == "//" else ast.Mod(), node.args[1])
        return _count_of_steps(made) or made

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return _count_of_steps(node) or node


def _count_of_steps(node: ast.BinOp) -> ast.expr | None:
    """Returns m for `(m * n + n - 1) // n`, where n is a size; None for another expression."""
    if not isinstance(node.op, ast.FloorDiv) or not isinstance(node.right, ast.Name):
        return None
    step = node.right.id
    signs = dict(_terms(node.left))
    products = [text for text in signs if text not in (step, "1")]
    if signs.get(step) != 1 or signs.get("1") != -1 or len(signs) != 3 or signs[products[0]] != 1:
        return None
    match ast.parse(products[0], mode="eval").body:
        case ast.BinOp(ast.Name(one), ast.Mult(), ast.Name(other)) if step in (one, other):
            return ast.Name(other if one == step else one, ast.Load())
    return None


def _terms(node: ast.expr, sign: int = 1) -> Iterator[tuple[str, int]]:
    """Yields the terms of a sum, with their signs."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right):
            yield from _terms(left, sign)
            yield from _terms(right, sign if isinstance(op, ast.Add) else -sign)
        case ast.UnaryOp(ast.USub(), inner):
            yield from _terms(inner, -sign)
        case ast.Constant(int(value)) if value < 0:
            yield str(-value), -sign
        case _:
            yield ast.unparse(node), sign


def python(expression: str) -> str:
    """Returns an expression of sizes in Python's spelling."""
    return expression.replace("^", "**")


@functools.lru_cache(maxsize=4096)
def canonical(expression: str) -> str:
    """Returns what is the same for expressions that differ in the order of terms and factors.

    Examples:
        >>> canonical("1 + (s0//4)*(s1//4)") == canonical("(s1//4)*(s0//4) + 1")
        True
    """
    try:
        return key_of(ast.parse(python(expression), mode="eval").body)
    except SyntaxError:
        return expression


def key_of(node: ast.expr) -> str:
    """Returns what is the same for code that differs in the order of terms and factors."""
    if isinstance(node, ast.BinOp):
        for kinds, sign in (((ast.Add, ast.Sub), " + "), ((ast.Mult,), "*")):
            if isinstance(node.op, kinds):
                return f"({sign.join(sorted(_parts(node, kinds)))})"
        known = {ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}
        sign = known.get(type(node.op), "?")
        return f"({key_of(node.left)}{sign}{key_of(node.right)})"
    if isinstance(node, ast.Call):
        args = [key_of(one) for one in node.args]
        kind = _OPERATORS.get(ast.unparse(node.func))
        return f"({kind.join(args)})" if kind else f"{ast.unparse(node.func)}({', '.join(args)})"
    return ast.unparse(node)


def factors(node: ast.expr) -> list[ast.expr]:
    """Returns what a product is of; other code alone."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*factors(node.left), *factors(node.right)]
    return [node]


def is_code(words: str) -> bool:
    """Returns whether text is an expression, or empty."""
    try:
        ast.parse(words or "0", mode="eval")
    except SyntaxError:
        return False
    return True


def _parts(node: ast.expr, kinds: tuple[type, ...], sign: str = "") -> list[str]:
    """Returns the terms of a sum, or the factors of a product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, kinds):
        is_less = isinstance(node.op, ast.Sub)
        other = ("" if sign else "-") if is_less else sign
        return [*_parts(node.left, kinds, sign), *_parts(node.right, kinds, other)]
    return [sign + key_of(node)]


_OPERATORS = {
    "floordiv": "//", "FloorDiv": "//", "mod": "%", "Mod": "%", "PythonMod": "%",
}  # fmt: skip
