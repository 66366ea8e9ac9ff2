"""Sizes that a function names in one mode and reads where it uses them in the other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from fmapper.translation.code import text

_SHAPE = re.compile(r"(?:(\w+)|\((.+)\)) = (\w+)\.shape(?:\[(\d+)\]|\[:\d+\])?")


def with_sizes(*modes: list[ast.stmt]) -> list[list[ast.stmt]]:
    r"""Returns the statements of each mode, all with the sizes that the first ones name.

    Examples:
        >>> ours = ast.parse("batch = x.shape[0]\ny = f(batch)\nreturn g(y, batch)").body
        >>> theirs = ast.parse("return g(x, x.shape[0])").body
        >>> print(*map(text, with_sizes(ours, theirs)[1]), sep="\n")
        batch = x.shape[0]
        return g(x, batch)
    """
    heads = [[one for one in body[: _begin(body)] if _sizes_of(one)] for body in modes]
    known = [dict(size for one in head for size in _sizes_of(one)) for head in heads]
    most = max(range(len(modes)), key=lambda at: len(known[at]))
    named = known[most]
    is_same = all(one.items() <= named.items() for one in known)
    if not named or not is_same or len({*named.values()}) < len(named):
        return [*modes]
    found = []
    for body, head in zip(modes, heads, strict=True):
        rest = [one for one in body if one not in head]
        if any({*named} & {*_targets_in(one)} for one in rest):
            return [*modes]
        at = body.index(head[0]) if head else _begin(body)
        names = {code: name for name, code in named.items()}
        found.append([*rest[:at], *heads[most], *_with_names(rest[at:], names)])
    return found


def _begin(body: list[ast.stmt]) -> int:
    """Returns how many statements come before the first that computes something."""
    for at, one in enumerate(body):
        is_check = isinstance(one, ast.Expr) or text(one) == "keys = Keys(key)"
        if not is_check and not _sizes_of(one):
            return at
    return len(body)


def _sizes_of(statement: ast.stmt) -> list[tuple[str, str]]:
    """Returns the names that a statement gives to sizes, with the code for those."""
    found = _SHAPE.fullmatch(text(statement))
    if not found:
        return []
    one, several, array, index = found.groups()
    if one:
        return [(one, f"{array}.shape[{index}]")] if index else []
    names = [name.strip() for name in several.split(",")]
    return [(name, f"{array}.shape[{at}]") for at, name in enumerate(names) if name.strip("_")]


def _targets_in(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _with_names(body: list[ast.stmt], names: dict[str, str]) -> list[ast.stmt]:
    """Returns statements that read sizes by their names, until what has the sizes is another."""
    found: list[ast.stmt] = []
    for one in body:
        later = {
            c: name for c, name in names.items() if c.partition(".")[0] not in _targets_in(one)
        }
        here = names if isinstance(one, ast.Assign | ast.Return) else later
        found += _Named(here).visit(ast.parse(text(one))).body
        names = later
    return found


class _Named(ast.NodeTransformer):
    """Puts names in place of sizes."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        known = self._names.get(text(node))
        if known is not None and isinstance(node.ctx, ast.Load):
            return ast.Name(known, ast.Load())
        self.generic_visit(node)
        return node
