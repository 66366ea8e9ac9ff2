"""Numbers as a person writes them: `8**-0.5`, `math.log(16)`, the least number of a dtype."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fmapper.translation.code import expr, text

if TYPE_CHECKING:
    from fmapper.translation.classes import Class

_LONG = re.compile(r"\d\.\d{9,}")
_LARGEST = {
    "float32": float.fromhex("0x1.fffffep+127"),
    "float64": float.fromhex("0x1.fffffffffffffp+1023"),
}
_MOST = 2**16


def restate(classes: Iterable[Class], limit: Callable[[str, str], ast.expr]) -> None:
    """Rewrites the long numbers in methods of which it is known what they are.

    Args:
        classes: The classes of a file; their methods are changed.
        limit: Returns the code for `min` or `max` of a dtype, as a number of Python.
    """
    for cls in classes:
        for method in cls.sketch.methods:
            restate_lines(method.lines, method.comments, limit)


def restate_lines(
    lines: list[str], comments: dict[str, str], limit: Callable[[str, str], ast.expr]
) -> None:
    """Rewrites the long numbers in statements, with what is a comment on which.

    Args:
        lines: The statements of a function, which are changed.
        comments: Lines of them -> the comments on those; what is rewritten is added.
        limit: As for all classes.
    """
    change = _Restate(limit)
    for at, line in enumerate(lines):
        if not _LONG.search(line):
            continue
        found = text(change.visit(ast.parse(line)))
        for old, new in zip(line.splitlines(), found.splitlines(), strict=True):
            if old.strip() in comments:
                comments[new.strip()] = comments[old.strip()]
        lines[at] = found


class _Restate(ast.NodeTransformer):
    def __init__(self, limit: Callable[[str, str], ast.expr]) -> None:
        self._limit = limit

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            found = self._limit_of(node.operand.value, "min")
            if found is not None:
                return found
        self.generic_visit(node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if type(node.value) is not float or not _LONG.search(repr(node.value)):
            return node
        return self._limit_of(node.value, "max") or spell(node.value) or node

    def _limit_of(self, value: object, end: str) -> ast.expr | None:
        dtypes = [dtype for dtype, largest in _LARGEST.items() if largest == value]
        return self._limit(dtypes[0], end) if dtypes else None


def spell(value: float) -> ast.expr | None:
    """Returns what a number is: a root, a logarithm or a multiple of pi; None if it is not known.

    Examples:
        >>> [text(spell(x)) for x in (3**-0.5, 2**0.25, math.log(16), 2 * math.pi)]
        ['3 ** -0.5', '2 ** 0.25', 'math.log(16)', '2 * math.pi']
        >>> text(spell(1 / math.sqrt(8)))
        '1 / math.sqrt(8)'
        >>> spell(0.1234567890123)
    """
    for power in (-0.5, 0.5, -0.25, 0.25):
        base = round(value ** (1 / power)) if 1 / _MOST < value < _MOST else 0
        if 1 < base < _MOST and base**power == value:
            return ast.BinOp(ast.Constant(base), ast.Pow(), ast.Constant(power))
        if 1 < base < _MOST and power == -0.5 and 1 / math.sqrt(base) == value:
            return expr("1 / math.sqrt({0})", base)
    number = round(math.exp(value)) if 0 < value < math.log(_MOST) else 0
    if number > 1 and math.log(number) == value:
        return expr("math.log({0})", number)
    for code, multiple in (("math.pi", 1.0), ("2 * math.pi", 2.0), ("math.pi / 2", 0.5)):
        if value == multiple * math.pi:
            return expr(code)
    return None
