"""The lines of the model's own code, as comments on statements that do not read for themselves."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from fmapper.translation.code import text
from fmapper.translation.functions.forms import Statement

_WIDEST = 84  # characters of a comment
_MANY = 7  # operations in one statement
_ALIKE = 0.75  # of a line and the statement that it became
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Subscript, ast.Compare)


def comments_on(statements: Sequence[Statement], opaque: Collection[str]) -> dict[str, str]:
    """Maps statements that do not read for themselves to the lines that they come from.

    Those are runs of statements that one line became, long expressions, and calls of functions that
    have only the name of an operation.

    Args:
        statements: Those of a function.
        opaque: The names of such functions.
    """
    found: dict[str, str] = {}
    told = ""
    for group in _groups(statements):
        first = group[0]
        for _, inner in first.blocks:
            found |= comments_on(inner, opaque)
        line = first.origin
        if line and line != told and _is_hard(group, opaque):
            found.setdefault(str(first), quote(line))
        told = line
    return found


def _groups(statements: Sequence[Statement]) -> Iterator[list[Statement]]:
    group: list[Statement] = []
    for statement in statements:
        if group and (not statement.origin or statement.origin != group[0].origin):
            yield group
            group = []
        group.append(statement)
    if group:
        yield group


def _is_hard(group: Sequence[Statement], opaque: Collection[str]) -> bool:
    several = {"; ".join(map(str, group)), *map(str, group)}
    if all(len(one.targets or ()) == 1 for one in group):  # `a, b = f(x), g(x)`
        targets = ", ".join(one.targets[0] for one in group if one.targets)
        several.add(f"{targets} = ({', '.join(text(one.node) for one in group)})")
    line = _plain(group[0].origin)
    if any(difflib.SequenceMatcher(None, line, _plain(one)).ratio() > _ALIKE for one in several):
        return False
    nodes = [node for one in group for node in ast.walk(one.node)]
    calls = {text(node.func) for node in nodes if isinstance(node, ast.Call)}
    many = sum(isinstance(node, _OPERATIONS) for node in nodes) >= _MANY
    return len(group) > 1 or many or bool(calls & {*opaque})


def _plain(code: str) -> str:
    """Returns code without spaces, and without modules and objects before a name."""
    return re.sub(r"\b[A-Za-z_]\w*\.(?=[A-Za-z_])|\s", "", code)


def quote(line: str) -> str:
    r"""Returns a line of code as a comment, which no character of it ends.

    Examples:
        >>> quote("x = f(a)\n\x0cimport os")
        '# x = f(a) import os'
    """
    words = "".join(one if one.isprintable() else " " for one in line).split()
    plain = " ".join(words)
    if len(plain) > _WIDEST:
        plain = f"{plain[:_WIDEST].rpartition(' ')[0] or plain[:_WIDEST]} ..."
    return f"# {plain}"


def comments_of(
    lines: Sequence[str], renamed: Sequence[str], comments: Mapping[str, str]
) -> dict[str, str]:
    """Returns the comments on statements whose variables have other names."""
    pairs = zip("\n".join(lines).splitlines(), "\n".join(renamed).splitlines(), strict=True)
    return {new.strip(): comments[old.strip()] for old, new in pairs if old.strip() in comments}


def with_comments(line: str, comments: Mapping[str, str]) -> list[str]:
    """Returns a statement, of several lines if it is a loop, below the comments on its lines."""
    first, *inner = line.splitlines()
    found = [first]
    for one in inner:
        code = one.lstrip()
        if code in comments:
            found.append(one[: len(one) - len(code)] + comments[code])
        found.append(one)
    above = [comments[first]] if first in comments else []
    return [*above, "\n".join(found)]
