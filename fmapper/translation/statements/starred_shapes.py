"""Writes the first sizes of an array as a slice of its shape: `*x.shape[:3]`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from fmapper.translation.code import expr, text
from fmapper.translation.functions.forms import Body

_FEWEST = 3  # sizes that are shorter so


def star_shapes(body: Body) -> None:
    """Joins sizes of one array that stand next to each other in the statements of a function."""
    for statement in body.walk():
        statement.node = _Starring().visit(statement.node)


class _Starring(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.args = join_sizes(node.args)
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        self.generic_visit(node)
        node.elts = join_sizes(node.elts)
        return node


def join_sizes(nodes: Iterable[ast.expr]) -> list[ast.expr]:
    """Returns arguments with the first sizes of an array as one.

    Examples:
        >>> sizes = ast.parse("(x.shape[0], x.shape[1], x.shape[2], 8)", mode="eval").body
        >>> [text(one) for one in join_sizes(sizes.elts)]
        ['*x.shape[:3]', '8']
    """
    left = [*nodes]
    found: list[ast.expr] = []
    while left:
        array = re.fullmatch(r"(\w+)\.shape\[0\]", text(left[0]))
        count = 1
        while array and left[count:] and text(left[count]) == f"{array[1]}.shape[{count}]":
            count += 1
        if array and count >= _FEWEST:
            found.append(ast.Starred(expr(f"{array[1]}.shape[:{count}]"), ast.Load()))
            del left[:count]
        else:
            found.append(left.pop(0))
    return found
