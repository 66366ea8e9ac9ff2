"""The numbers in code, which classes that are one otherwise have as arguments."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

SHORTER = {"kernel_dilation": "dilation", "feature_group_count": "groups"}  # keywords -> variables


def numbers_in(node: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    """Yields the numbers in code, with the keyword that each is given for."""

    def visit(one: ast.AST, keyword: str) -> Iterator[tuple[ast.Constant, str]]:
        if isinstance(one, ast.keyword):
            yield from visit(one.value, one.arg or "")
            return
        if isinstance(one, ast.Constant) and type(one.value) in (int, float):
            yield one, keyword
            return
        if isinstance(one, ast.Constant) and type(one.value) is bool and keyword:
            yield one, keyword
            return
        if isinstance(one, ast.Call):
            yield from visit(one.func, "")
            for i, argument in enumerate(one.args):
                yield from visit(argument, f"{ast.unparse(one.func)}:{i}")
            for key in one.keywords:
                yield from visit(key, "")
            return
        for inner in ast.iter_child_nodes(one):
            yield from visit(inner, keyword if isinstance(one, ast.Tuple | ast.UnaryOp) else "")

    yield from visit(node, "")


def mask_numbers(node: ast.AST) -> str:
    """Masks the numbers in code, except for indices."""
    node = copy.deepcopy(node)
    for constant, _ in numbers_in(node):
        constant.value = 0
    return ast.unparse(node)
