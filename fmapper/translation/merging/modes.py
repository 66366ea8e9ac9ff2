"""One class for what a submodule does in training and in evaluation, by the mode that it is in.

What differs is below `if self.deterministic`, an attribute that the framework sets with the mode.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fmapper.errors import ConversionError
from fmapper.translation.code import expr, text

if TYPE_CHECKING:
    from fmapper.translation.classes import Sketch

FLAG = "deterministic"
_TUPLE = re.compile(r"(?m)^( *return )\((.*)\)$")
# Statements that differ in more places and of which fewer are alike are below one `if`.
_MOST_CHANGES, _LEAST_ALIKE = 3, 0.5


def combine(train: Sketch, evaluation: Sketch) -> None:
    """Adds what a submodule does in evaluation to its sketch for training.

    Raises:
        ConversionError: It has other parts, arguments or methods there.
    """
    made = {attr: text(node) for attr, node in train.made}
    is_alike = (
        all(made.get(attr) == text(node) for attr, node in evaluation.made)
        and train.ties == evaluation.ties
        and {one.name for one in evaluation.methods} <= {one.name for one in train.methods}
    )
    others = {one.name: one for one in evaluation.methods}
    differ = False
    for method in train.methods:
        other = others.get(method.name)
        if other is None:
            continue
        is_alike &= method.parameters == other.parameters
        lines = combine_statements(method.lines, other.lines)
        differ |= lines != method.lines
        method.lines, method.comments = lines, other.comments | method.comments
    if not is_alike:
        raise ConversionError(
            f"{train.path or train.title}: its parts or arguments are others in evaluation than in "
            "training, so that one class cannot have both. Use train=False (--eval)"
        )
    if differ:
        train.made.append((FLAG, expr("False")))


def combine_statements(train: Sequence[str], evaluation: Sequence[str]) -> list[str]:
    r"""Returns the statements of a function for both modes.

    Where both have a statement it stands once; each mode is left with its own statements, in order.

    Examples:
        >>> print(*combine_statements(["x = f(x)", "x = g(x)", "return x"],
        ...                           ["x = f(x)", "return x"]), sep="\n")
        x = f(x)
        if not self.deterministic:
            x = g(x)
        return x
    """
    ours, theirs = (ast.parse("\n".join(lines)).body for lines in (train, evaluation))
    return [_TUPLE.sub(r"\1\2", text(one)) for one in _combine(ours, theirs)]


def _combine(train: list[ast.stmt], evaluation: list[ast.stmt]) -> list[ast.stmt]:
    ours, theirs = ([text(one) for one in side] for side in (train, evaluation))
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    found: list[ast.stmt] = []
    changes = sum(kind != "equal" for kind, *_ in matcher.get_opcodes())
    if changes > _MOST_CHANGES and matcher.ratio() < _LEAST_ALIKE:
        return _choice(train, evaluation)
    for kind, begin, end, first, last in matcher.get_opcodes():
        if kind == "equal":
            found += train[begin:end]
            continue
        mine, other = train[begin:end], evaluation[first:last]
        at, there = _same_loop(mine, other)
        if at < 0:
            found += _choice(mine, other)
            continue
        loop, same = mine[at], other[there]
        assert isinstance(loop, ast.For)
        assert isinstance(same, ast.For)
        found += _choice(mine[:at], other[:there])
        found.append(ast.For(loop.target, loop.iter, _combine(loop.body, same.body), []))
        found += _choice(mine[at + 1 :], other[there + 1 :])
    return found


def _same_loop(train: list[ast.stmt], evaluation: list[ast.stmt]) -> tuple[int, int]:
    """Returns the places of the one loop that both have; -1 if there is none, or several."""
    heads = [[_head(one) for one in side] for side in (train, evaluation)]
    if any(sum(map(bool, side)) != 1 for side in heads):
        return -1, -1
    ours, theirs = (next(filter(None, side)) for side in heads)
    return (heads[0].index(ours), heads[1].index(theirs)) if ours == theirs else (-1, -1)


def _head(statement: ast.stmt) -> str:
    """Returns the beginning of a loop; empty for other statements."""
    if not isinstance(statement, ast.For) or statement.orelse:
        return ""
    return f"{text(statement.target)} in {text(statement.iter)}"


def _choice(train: list[ast.stmt], evaluation: list[ast.stmt]) -> list[ast.stmt]:
    """Returns statements for each mode; none after those that return."""
    if not train and not evaluation:
        return []
    if not evaluation:
        return [ast.If(expr(f"not self.{FLAG}"), train, [])]
    if isinstance(evaluation[-1], ast.Return):
        return [ast.If(expr(f"self.{FLAG}"), evaluation, []), *train]
    return [ast.If(expr(f"self.{FLAG}"), evaluation, train)]  # `train` may be empty
