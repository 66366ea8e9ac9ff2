"""Classes that are written for equal arguments, where others of them take different ones."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fmapper.translation.code import text
from fmapper.translation.merging.statements import read_lines

if TYPE_CHECKING:
    from fmapper.translation.classes import Method, Sketch


def share_methods(sketches: Sequence[Sketch]) -> None:
    """Gives submodules the methods of others of their class that ask less of their arguments.

    A layer of attention that is given the same array as query, key and value computes with one of
    them; where another layer is given others, its code is right for both.

    Args:
        sketches: What each submodule needs; their methods change.
    """
    groups: dict[str, list[Sketch]] = {}
    for sketch in sketches:
        names = [(one.name, one.parameters) for one in sketch.methods]
        groups.setdefault(f"{sketch.shape_of_parts()} {names}", []).append(sketch)
    for group in groups.values():
        for sketch in group:
            for at, method in enumerate(sketch.methods):
                others = [
                    one.methods[at]
                    for one in group
                    if (one.flags, one.words) == (sketch.flags, sketch.words)
                ]  # or the code of others may be something else, for arguments that differ
                wider = [one for one in others if _is_wider(one, method)]
                if wider:
                    made = copy.deepcopy(min(wider, key=lambda one: len(_twins(one)[0])))
                    made.shapes = method.shapes
                    sketch.methods[at] = made


def _is_wider(other: Method, method: Method) -> bool:
    """Returns whether a method asks less of its arguments, and is otherwise the same."""
    pairs, rest = _twins(method)
    less, same = _twins(other)
    if not len(less) < len(pairs) or rest != same:
        return False
    first = {name: name for name in method.parameters}
    for name, twin in pairs:
        first[name] = first.get(twin, twin)
    if any(first.get(a, a) != first.get(b, b) for a, b in less):
        return False
    mine, theirs = (
        read_lines([line for line in one.lines if line != one.terms.check], {})
        for one in (method, other)
    )
    if [line.key for line in mine] != [line.key for line in theirs]:
        return False
    known: dict[int, int] = {}
    for line, another in zip(mine, theirs, strict=True):
        if [*line.sizes.values()] != [*another.sizes.values()]:
            return False
        known |= dict(zip(another.versions.values(), line.versions.values(), strict=True))
        for leaf, one in zip(line.leaves, another.leaves, strict=True):
            if leaf.is_store:
                known[one.version] = leaf.version
            elif not leaf.name or one.version < 0:
                a, b = text(leaf.node), text(one.node)
                if leaf.version >= 0 or first.get(a, a) != first.get(b, b):
                    return False
            elif known.get(one.version) != leaf.version:
                return False
    return True


def _twins(method: Method) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns which arguments must be the same, and what else they must be, as text."""
    if not method.terms.has_twins:
        return [], []
    (statement,) = ast.parse(method.terms.check).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    condition = statement.value.args[0]
    is_all = isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And)
    terms = condition.values if is_all and isinstance(condition, ast.BoolOp) else [condition]
    twins, rest = [], []
    for term in terms:
        match term:
            case ast.Compare(ast.Name(a), [ast.Is()], [ast.Name(b)]):
                twins.append((a, b))
            case _:
                rest.append(text(term))
    return twins, rest
