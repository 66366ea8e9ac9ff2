"""Expressions with sides, buffers, and lists of numbers."""

from __future__ import annotations

import ast
import types
from typing import TYPE_CHECKING, Any

from fmapper.translation import expr, literal
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.printing.folding import ends, fold, is_constant, known_test
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.walk.expressions import Expressions


def print_choice(expressions: Expressions, node: ast.expr) -> ast.expr | None:
    """Returns the code for `and`, `or`, conditional expressions and dicts; None for others."""
    match node:
        case ast.BoolOp(op, values):
            codes: list[ast.expr] = []
            for value in values:
                codes.append(expressions.code(value))
                if ends(codes[-1], op):
                    break
            return fold(ast.BoolOp(op, codes)) if len(codes) > 1 else codes[0]
        case ast.Dict(keys, values) if library.is_library(expressions.function.module):
            pairs = [
                (key and expressions.code(key), expressions.code(value))
                for key, value in zip(keys, values, strict=True)
            ]  # what a call has as `**` of it
            kept = [(key, value) for key, value in pairs if not _is_left_out(key, value)]
            return ast.Dict([key for key, _ in kept], [value for _, value in kept])
        case ast.IfExp(test, then, other):
            condition = expressions.code(test)
            outcome = known_test(condition)
            if outcome is not None:
                return expressions.code(then if outcome else other)
            sides = [_side(expressions, node, side) for side in (then, other)]
            made = ast.IfExp(condition, *sides)
            is_turned = isinstance(test, ast.UnaryOp) or not isinstance(condition, ast.UnaryOp)
            return made if is_turned else fold(made)
    return None


def _is_left_out(key: ast.expr | None, value: ast.expr) -> bool:
    is_named = isinstance(key, ast.Constant) and key.value in library.LEFT_OUT
    return is_named and isinstance(value, ast.Constant) and library.is_nothing(value.value)


def _side(expressions: Expressions, choice: ast.IfExp, side: ast.expr) -> ast.expr:
    """Returns the code for a side of a conditional expression; a call that raises if it has none.

    Raises:
        NotTranscribed: It ran.
    """
    outcomes = {bool(value) for value in expressions.values(choice.test)}
    try:
        return expressions.code(side)
    except NotTranscribed:
        if len(outcomes) != 1 or (side is choice.body) in outcomes:
            raise
        return expr("not_written()")


def is_by_name(expressions: Expressions, value: Any) -> bool:
    """Returns whether something is a class, or a function that a file has another one for."""
    is_function = isinstance(value, types.FunctionType | types.BuiltinFunctionType)
    return isinstance(value, type) or (is_function and value in expressions.file.layers.functions)


def by_name(expressions: Expressions, node: ast.Call, key: ast.expr) -> ast.expr:
    """Returns the code for `getattr(nn, name)`: a table of the classes that it gave."""
    if isinstance(key, ast.Constant):
        return expressions.reference(node, expressions.values(node)[0])
    named = {item.parts[key].value: item.value for item in expressions.events(node)}
    kinds = [expressions.reference(node, kind) for kind in named.values()]
    table = ast.Dict([*map(literal, named)], kinds)
    return ast.Subscript(table, expressions.code(key), ast.Load())


def buffer(expressions: Expressions, node: ast.Call) -> ast.expr:
    """Returns the code for `nn.Buffer`."""
    kept = [key.value for key in node.keywords if key.arg == "persistent"]
    is_saved = not kept or not is_constant(expressions.code(kept[0]), False)
    kind = "buffer" if is_saved else "constant"
    made: ast.expr = expressions.file.target.array(kind, expressions.code(node.args[0]))
    return made


def are_numbers(value: Any) -> bool:
    """Returns whether a list is one of numbers, or of lists of them."""
    return isinstance(value, list) and all(
        are_numbers(item) if isinstance(item, list) else isinstance(item, int | float)
        for item in value
    )
