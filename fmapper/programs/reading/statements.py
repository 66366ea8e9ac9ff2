"""The statements of a model's code that make calls, read while it is recorded."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable


def statements_at(sources: Iterable[str]) -> dict[str, str]:
    """Returns the statements at places `file:line`, without those that cannot be read."""
    statements = {}
    for source in sources:
        file, _, line = source.rpartition(":")
        text = _by_line(file).get(int(line)) if line.isdigit() else None
        if text is not None:
            statements[source] = text
    return statements


@functools.lru_cache(maxsize=1024)
def parameters_at(file: str, line: int, name: str) -> tuple[str, ...]:
    """Returns the parameters of the function that begins at a line, with its decorators.

    Parameters that a decorator lists as `nondiff_argnums` are left out; empty if the code cannot be
    read.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != name.rpartition(".")[2]:
            continue
        begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if not begin <= line <= node.body[0].lineno or node.args.vararg or node.args.kwonlyargs:
            continue
        left = {at for decorator in node.decorator_list for at in _left_out(decorator)}
        named = [*node.args.posonlyargs, *node.args.args]
        return tuple(parameter.arg for at, parameter in enumerate(named) if at not in left)
    return ()


def _left_out(decorator: ast.expr) -> tuple[int, ...]:
    """Returns the `nondiff_argnums` of a decorator."""
    for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
        if keyword.arg == "nondiff_argnums":
            items = (
                keyword.value.elts
                if isinstance(keyword.value, ast.Tuple | ast.List)
                else [keyword.value]
            )
            values = [item.value for item in items if isinstance(item, ast.Constant)]
            return tuple(value for value in values if isinstance(value, int))
    return ()


@functools.lru_cache(maxsize=256)
def _by_line(file: str) -> dict[int, str]:
    """Returns the innermost statement at each line of a file, as a single line."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    statements: dict[int, str] = {}
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
            text = ast.unparse(node)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                statements[line] = text
    return statements
