"""Recognises conditions that test for rows: `if rows.numel() > 0`, `if mask.any()`.

    chosen = (index == expert).any(-1)
    if not chosen.any():
        continue
    out[chosen] += expert(x[chosen])

The block under such a condition may run unconditionally if it has no effect without rows. This is
proved as for a loop over experts (`expert_loops`).
"""

from __future__ import annotations

import ast
import functools
import textwrap
import types
from dataclasses import dataclass

from fmapper_adapters.torch.record.values.loop_proof import (
    NotProved,
    ends_iteration,
    prove_block,
    question_of,
    tree_of,
)


@dataclass(frozen=True)
class Question:
    """A condition that tests whether there is a row.

    Attributes:
        name: The local variable in the condition.
        is_mask: Whether it is a mask with a true element for each row, not the indices of rows.
        lines: The first and the last line that run only if there is a row.
    """

    name: str
    is_mask: bool
    lines: tuple[int, int]


def question_at(frame: types.FrameType) -> Question | None:
    """Returns the condition at the current line of a frame, if it can be left out."""
    tree = tree_of(frame.f_code)
    if tree is None:
        return None
    conditions = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    for node in conditions:
        if not node.test.lineno <= frame.f_lineno <= (node.test.end_lineno or node.test.lineno):
            continue
        if (question := _question(node.test)) is None or node.orelse:
            return None
        name, is_mask, answer = question
        statements = node.body if answer else _rest_of_iteration(tree, node)
        if not statements:
            return None
        try:
            prove_block(frame, tree, statements, set())
        except NotProved:
            return None
        last = statements[-1].end_lineno or statements[-1].lineno
        return Question(name, is_mask, (statements[0].lineno, last))
    return None


@functools.cache
def has_questions(source: str) -> bool:
    """Returns whether source code may contain such conditions."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return False
    return any(isinstance(node, ast.If) and _question(node.test) for node in ast.walk(tree))


def _question(test: ast.expr) -> tuple[str, bool, bool] | None:
    """Returns the name in a condition, whether it is a mask, and the answer if there are rows."""
    question = question_of(test)
    if question is None or not isinstance(question[0], ast.Name):
        return None
    return question[0].id, *question[1:]


def _rest_of_iteration(tree: ast.Module, condition: ast.If) -> list[ast.stmt]:
    """Returns the statements of a loop after `if …: continue`; none for another condition."""
    if not ends_iteration(condition):
        return []
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and condition in loop.body:
            return loop.body[loop.body.index(condition) + 1 :]
    return []
