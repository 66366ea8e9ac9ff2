"""`if` on an array: each of its assignments is made under `jax.lax.cond`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fmapper.translation import expr, text
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.walk.statements import Statements

_HOLDS = "condition"


def is_on_array(expressions: Any, test: ast.expr) -> bool:
    """Returns whether the outcome of a condition is known only when the model runs."""
    match test:
        case ast.UnaryOp(ast.Not(), inner):
            return is_on_array(expressions, inner)
        case ast.BoolOp(_, values):
            return any(is_on_array(expressions, value) for value in values)
    return any(map(expressions.file.recording.source.is_array, expressions.values(test)))


def print_selection(statements: Statements, node: ast.If) -> Iterator[str]:
    """Prints an `if` on an array, whose sides assign arrays to names.

    Raises:
        NotTranscribed: A side does something else, or calls what may change the model.
    """
    names = {item.id for item in statements.nodes if isinstance(item, ast.Name)}
    holds = next(name for name in map((_HOLDS + "{}").format, ("", *range(9))) if name not in names)
    sides = {True: node.body, False: node.orelse}
    yield f"{holds} = {text(_test(statements, node.test))}"
    on_both = set.intersection(*({*map(_name, body)} for body in sides.values()))
    for side, body in sides.items():
        for statement in body:
            name, value = _name(statement), statement.value  # type: ignore[attr-defined]
            _refuse_calls(statements, value)
            code = _value(statements, statement)
            is_inside = not _is_used_outside(statements, node, name)
            if is_inside or (side and name in on_both and not _is_before(statements, node, name)):
                yield f"{name} = {text(code)}"
                continue
            if not all(map(statements.is_array, statements.expressions.values(value))):
                raise NotTranscribed(f"the condition is an array, and {name} is none")
            other = ast.Name(name)
            pair = (code, other) if side else (other, code)
            made = expr("jax.lax.cond({0}, lambda: {1}, lambda: {2})", ast.Name(holds), *pair)
            yield f"{name} = {text(made)}"


def _test(statements: Statements, test: ast.expr) -> ast.expr:
    match test:
        case ast.UnaryOp(ast.Not(), inner):
            return expr("jnp.logical_not({0})", _test(statements, inner))
        case ast.BoolOp(op, [first, *rest]):
            made = _test(statements, first)
            name = "and" if isinstance(op, ast.And) else "or"
            for value in rest:
                made = expr(f"jnp.logical_{name}({{0}}, {{1}})", made, _test(statements, value))
            return made
    return statements.code(test)


def _name(statement: ast.stmt) -> str:
    match statement:
        case ast.Assign([ast.Name(name)]) | ast.AugAssign(ast.Name(name)):
            return name
    what = ast.unparse(statement).splitlines()[0]
    raise NotTranscribed(f"the condition is an array, and a side does more than assign: `{what}`")


def _value(statements: Statements, statement: ast.stmt) -> ast.expr:
    match statement:
        case ast.AugAssign(ast.Name(name), op, value):
            return ast.BinOp(ast.Name(name), op, statements.code(value))
        case ast.Assign(value=value):
            return statements.code(value)
    raise AssertionError


def _refuse_calls(statements: Statements, value: ast.expr) -> None:
    """Refuses calls of modules and functions of the model, which may change its state."""
    recording = statements.expressions.file.recording
    for call in (item for item in ast.walk(value) if isinstance(item, ast.Call)):
        callee = statements.expressions.callee(call)
        if recording.source.is_module(callee) or recording.function_of(callee) is not None:
            what = ast.unparse(call.func)
            raise NotTranscribed(f"the condition is an array, and a side calls {what}")


def _is_used_outside(statements: Statements, node: ast.If, name: str) -> bool:
    inside = {*ast.walk(node)}
    return any(
        isinstance(item, ast.Name) and item.id == name and item not in inside
        for item in statements.nodes
    )


def _is_before(statements: Statements, node: ast.If, name: str) -> bool:
    """Returns whether a name has a value when a condition is tested."""
    return any(
        (isinstance(item, ast.arg) and item.arg == name)
        or (isinstance(item, ast.Name) and item.id == name and item.lineno < node.lineno)
        for item in statements.nodes
    )
