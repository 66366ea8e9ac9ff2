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
import inspect
import textwrap
import types
from dataclasses import dataclass

from fmapper_adapters.torch.record.values.loop_proof import Body, NotProved, names

_COUNTS = {"numel": False, "any": True, "sum": True}  # method -> whether it is called on a mask
# A comparison of a count with a number -> its result if there are rows.
_COMPARED = {
    (ast.Eq, 0): False, (ast.LtE, 0): False, (ast.Lt, 1): False,
    (ast.NotEq, 0): True, (ast.Gt, 0): True, (ast.GtE, 1): True,
}  # fmt: skip


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
    tree = _tree(frame.f_code)
    if tree is None:
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or not _has_line(node.test, frame.f_lineno):
            continue
        if (question := _question(node.test)) is None or node.orelse:
            return None
        name, is_mask, answer = question
        statements = node.body if answer else _rest_of_iteration(tree, node)
        if not statements:
            return None
        try:
            _prove(frame, tree, statements)
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


@functools.cache
def _tree(code: types.CodeType) -> ast.Module | None:
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return None
    ast.increment_lineno(tree, first - 1)
    return tree


def _has_line(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _question(test: ast.expr) -> tuple[str, bool, bool] | None:
    """Returns the name in a condition, whether it is a mask, and the answer if there are rows."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _question(test.operand)
        return None if inner is None else (*inner[:2], not inner[2])
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        (limit,) = test.comparators
        value = limit.value if isinstance(limit, ast.Constant) else None
        answer = _COMPARED.get((type(test.ops[0]), value)) if type(value) is int else None
        counted = _count_of(test.left)
        return None if counted is None or answer is None else (*counted, answer)
    counted = _count_of(test)
    return None if counted is None else (*counted, True)


def _count_of(node: ast.expr) -> tuple[str, bool] | None:
    """Returns the name in `x.numel()`, `x.size(0)`, `x.shape[0]`, `len(x)`, `x.any()`, ..."""
    if isinstance(node, ast.Subscript):
        shape = node.value
        is_first = isinstance(node.slice, ast.Constant) and node.slice.value == 0
        if is_first and isinstance(shape, ast.Attribute) and shape.attr == "shape":
            return _name_in(shape.value, False)
        return None
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
        return _name_in(node.args[0], False)
    if not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr == "item" and not node.args:
        inner = node.func.value
        return _count_of(inner) if isinstance(inner, ast.Call) else None
    if node.func.attr == "size" and [getattr(a, "value", None) for a in node.args] == [0]:
        return _name_in(node.func.value, False)
    owner = node.func.value
    if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in ("any", "sum"):
        return _name_in(node.args[0], True) if len(node.args) == 1 else None
    if node.func.attr in _COUNTS and not node.args:
        return _name_in(owner, _COUNTS[node.func.attr])
    return None


def _name_in(node: ast.expr, is_mask: bool) -> tuple[str, bool] | None:
    return (node.id, is_mask) if isinstance(node, ast.Name) else None


def _rest_of_iteration(tree: ast.Module, condition: ast.If) -> list[ast.stmt]:
    """Returns the statements of a loop after `if …: continue`; none for another condition."""
    if len(condition.body) != 1 or not isinstance(condition.body[0], ast.Continue):
        return []
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and condition in loop.body:
            return loop.body[loop.body.index(condition) + 1 :]
    return []


def _prove(frame: types.FrameType, tree: ast.Module, statements: list[ast.stmt]) -> None:
    """Raises NotProved for statements that may have effects other than writes to tensors."""
    stored = set(names(statements, ast.Store))
    Body(frame, stored).block(statements, set())
    if stored & {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}:
        raise NotProved("other functions read these names")
    inside = {id(child) for part in statements for child in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            raise NotProved("the function assigns to names of other scopes")
        if isinstance(node, ast.Name) and id(node) not in inside and node.id in stored:
            raise NotProved(f"{node.id} is used elsewhere")
