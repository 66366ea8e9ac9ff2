"""`if` of the source: both sides, or the one that ran."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fmapper.translation import text
from fmapper_translate.operations import negate
from fmapper_translate.printing.folding import known_test
from fmapper_translate.printing.selections import is_on_array
from fmapper_translate.walk.errors import NotTranscribed, Unnamed

if TYPE_CHECKING:
    from fmapper_translate.walk.statements import Statements

UNSEEN = "the source does something else here, which no example has shown"

INDENT = "    "


def print_if(statements: Statements, node: ast.If) -> Iterator[str]:
    """Prints a condition: both sides, or the one that ran and a check."""
    if _asks_for_device(statements, node.test):
        return
    if is_on_array(statements.expressions, node.test):
        yield from statements.select(node)
        return
    try:
        outcome = known_test(statements.code(node.test))
    except NotTranscribed:
        outcome = None
    if outcome is not None:
        yield from statements.block(node.body if outcome else node.orelse)
        return
    tests = [bool(value) for value in statements.expressions.values(node.test)]
    sides = {}
    for side, body in ((True, node.body), (False, node.orelse)):
        try:
            sides[side] = list(statements.block(body, strict=True))
        except NotTranscribed:
            if side in tests or not tests:
                raise
    try:
        test = statements.code(node.test)
    except Unnamed:
        if len(set(tests)) != 1:
            raise
        yield from sides[tests[0]]
        return
    except NotTranscribed:
        decided = _ran(statements, node.test)
        if decided is None or set(tests) != {False}:
            raise
        yield f"assert {text(negate(decided))}, {UNSEEN!r}"
        yield from sides[False]
        return
    if len(sides) == 2:
        if not any(sides.values()):
            return
        if not sides[True]:
            sides = {True: sides[False], False: []}
            test = negate(test)
        yield f"if {text(test)}:"
        yield from (INDENT + line for line in sides[True])
        is_elif = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        if is_elif and sides[False] and sides[False][0].startswith("if "):
            yield f"el{sides[False][0]}"
            yield from sides[False][1:]
        elif sides[False]:
            yield "else:"
            yield from (INDENT + line for line in sides[False])
        return
    side = next(iter(sides))
    condition = test if side else negate(test)
    yield f"assert {text(condition)}, {UNSEEN!r}"
    yield from sides[side]


def _ran(statements: Statements, test: ast.expr) -> ast.expr | None:
    """Returns the code for the operands of an `and` that ran, of which one never held."""
    if not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.And):
        return None
    events = statements.expressions.file.recording.events
    ran = [statements.code(item) for item in test.values if item in events]
    return ast.BoolOp(test.op, ran) if len(ran) > 1 else next(iter(ran), None)


def _asks_for_device(statements: Statements, test: ast.expr) -> bool:
    """Returns whether a condition is on a device, or on the argument for one."""
    return any(
        isinstance(item, ast.expr) and statements.is_left_out(item) for item in ast.walk(test)
    )
