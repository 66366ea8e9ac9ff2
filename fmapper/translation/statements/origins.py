"""The lines of the model's own code, as comments on the statements that they became."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fmapper.translation.functions.forms import Statement

_WIDEST = 84  # characters of a comment


def comments_on(statements: Sequence[Statement]) -> dict[str, str]:
    """Maps the first of the statements that a line became to that line, unless it is the line."""
    found: dict[str, str] = {}
    before = ""
    for one in statements:
        for _, inner in one.blocks:
            found |= comments_on(inner)
        if one.origin not in ("", before, str(one)):
            found.setdefault(str(one), quote(one.origin))
        before = one.origin
    return found


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
