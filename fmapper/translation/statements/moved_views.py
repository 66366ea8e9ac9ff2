"""Writes a view of a value where the value is made: `q = split(x).transpose(1, 2)`."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Collection, Iterator

from fmapper.translation.code import replace_nodes, text
from fmapper.translation.functions.forms import Statement

_LONGEST = 88


def move_views(statements: list[Statement], methods: Collection[str]) -> None:
    """Moves views of values that nothing else reads to where the values are made, in place.

    An argument `q.transpose(1, 2)` is `q` then; so is a statement that is nothing but such a view
    of what the statement before makes.

    Args:
        statements: Of a function.
        methods: The methods of arrays that give another view of one.
    """
    for made in [one for one in statements if len(one.targets or ()) == 1 and not one.blocks]:
        (target,) = made.targets or ("",)
        at = next((i for i, one in enumerate(statements) if one is made), len(statements))
        reader = _find_only_reader(statements[at + 1 :], target)
        view = None if reader is None else _view_in(reader.node, target, methods)
        if reader is None or view is None:
            continue
        node = _without_source(view, target, made.node)
        is_next = view is reader.node and bool(reader.targets) and statements[at + 1] is reader
        if len(text(node)) + len(target) > _LONGEST:
            if is_next:
                _pass_on(statements, at + 1, view)
        elif is_next:
            reader.node, reader.origin = node, made.origin or reader.origin
            del statements[at]
        elif any(one is view for one in _arguments_in(reader.node)):
            made.node = node
            made.shapes.pop(target, None)
            reader.node = replace_nodes(reader.node, {id(view): ast.Name(target, ast.Load())})


def _pass_on(statements: list[Statement], at: int, view: ast.expr) -> None:
    """Writes a view, the value of a statement, where that alone is read; if it fits there."""
    (target,) = statements[at].targets or ("",)
    if at + 1 == len(statements) or _find_only_reader(statements[at + 1 :], target) is None:
        return
    reader = statements[at + 1]
    if target not in re.findall(r"\w+", text(reader.node)) or reader.blocks:
        return
    node = _without_source(reader.node, target, view)
    if len(text(node)) <= _LONGEST:
        reader.node = node
        del statements[at]


def _find_only_reader(later: list[Statement], target: str) -> Statement | None:
    """Returns the statement that alone reads a variable, and once; None if there is none."""
    found = None
    for one in later:
        count = len(re.findall(rf"(?<![.\w]){target}\b(?!=)", _text_of(one)))
        if count and (found is not None or count > 1 or one.blocks):
            return None
        found = one if count else found
        if target in (one.targets or ()):
            break
    return found


def _text_of(statement: Statement) -> str:
    """Returns what a statement reads; of a loop or branch all that it says."""
    return str(statement) if statement.blocks else text(statement.node)


def _view_in(node: ast.expr, target: str, methods: Collection[str]) -> ast.expr | None:
    """Returns the largest expression that is a view of a variable."""
    found = (one for one in ast.walk(node) if isinstance(one, ast.expr))
    return next((one for one in found if _is_view(one, target, methods)), None)


def _is_view(node: ast.expr, target: str, methods: Collection[str]) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if node.func.attr not in methods or node.keywords or not all(map(_is_number, node.args)):
        return False
    source = node.func.value
    is_it = isinstance(source, ast.Name) and source.id == target
    return is_it or _is_view(source, target, methods)


def _is_number(node: ast.expr) -> bool:
    return re.fullmatch(r"-?\d+", text(node)) is not None


def _without_source(node: ast.expr, target: str, source: ast.expr) -> ast.expr:
    """Returns code with that of a variable's value in the place of the variable."""
    node = copy.deepcopy(node)  # it may stay where it is
    names = (one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == target)
    found: ast.expr = replace_nodes(node, {id(next(names)): source})
    return found


def _arguments_in(node: ast.expr) -> Iterator[ast.expr]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            yield from one.args
            yield from (keyword.value for keyword in one.keywords)
