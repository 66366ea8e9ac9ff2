"""`if` on an array: each of its assignments is made under `jax.lax.cond`.

Layers run whatever it holds, and `jnp.where` chooses: what they draw cannot be drawn below it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fmapper.translation import expr, text
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.statements import Statements

_HOLDS = "condition"
_COND = "jax.lax.cond({0}, lambda: {1}, lambda: {2})"


def is_on_array(expressions: Any, test: ast.expr) -> bool:
    """Returns whether the outcome of a condition is known only when the model runs."""
    constructs = expressions.file.constructs(expressions.function)
    nodes = [(None if constructs else number_of(item)) or item for item in operands(test)]
    return any(_is_array(expressions, node) for node in nodes)


def operands(test: ast.expr) -> Iterator[ast.expr]:
    """Returns the operands of a condition on both sides of `and` and `or`, without `not`."""
    match test:
        case ast.UnaryOp(ast.Not(), inner):
            yield from operands(inner)
        case ast.BoolOp(_, values):
            for value in values:
                yield from operands(value)
        case _:
            yield test


def _is_array(expressions: Any, node: ast.expr) -> bool:
    return any(map(expressions.file.recording.source.is_array, expressions.values(node)))


def number_of(test: ast.expr) -> ast.expr | None:
    """Returns the array whose truth a condition asks for by `x.item()` or `bool(x)`, or None."""
    match test:
        case ast.Call(ast.Attribute(array, "item"), [], []) | ast.Call(ast.Name("bool"), [array]):
            return array
    return None


def print_selection(statements: Statements, node: ast.If) -> Iterator[str]:
    """Prints an `if` on an array, whose sides assign arrays to names, also below other conditions.

    Raises:
        NotTranscribed: A side does something else, or calls what may change the model.
    """
    match node.test:
        case ast.BoolOp(ast.And(), [first, *rest]) if not is_on_array(
            statements.expressions, first
        ):
            if node.orelse:
                raise NotTranscribed("a part of the condition is an array, and it has an else")
            test = rest[0] if len(rest) == 1 else ast.BoolOp(ast.And(), rest)
            yield f"if {text(statements.code(first))}:"
            inner = ast.copy_location(ast.If(test, node.body, []), node)
            yield from ("    " + line for line in print_selection(statements, inner))
            return
    if not node.orelse and all(isinstance(item, ast.Raise) for item in node.body):
        yield print_check(statements, ast.UnaryOp(ast.Not(), node.test), node.body[0])
        return
    names = {item.id for item in statements.nodes if isinstance(item, ast.Name)}
    holds = next(name for name in map((_HOLDS + "{}").format, ("", *range(9))) if name not in names)
    yield f"{holds} = {text(_test(statements, node.test))}"
    for side, body in ((True, node.body), (False, node.orelse)):
        yield from statements.select_within(Selection(node, holds, side), body)


def print_check(statements: Statements, test: ast.expr, origin: ast.AST) -> str:
    """Returns the statement that raises where a condition on arrays does not hold, under jit too.

    Args:
        statements: The printer of the function.
        test: The condition.
        origin: What has the message: the first text in it.
    """
    texts = (x.value for x in ast.walk(origin) if isinstance(x, ast.Constant))
    message = next((x for x in texts if isinstance(x, str)), ast.unparse(test))
    return f"check({text(_test(statements, test))}, {message!r})"


@dataclass(frozen=True)
class Selection:
    """A side of an `if` on an array.

    Attributes:
        node: The `if`.
        holds: The name of its condition in the file.
        side: Whether it is the side for a condition that holds.
    """

    node: ast.If
    holds: str
    side: bool

    def print(self, statements: Statements, statement: ast.stmt) -> Iterator[str]:
        """Prints a statement of the side.

        Raises:
            NotTranscribed: It does something else than to give a name an array.
        """
        if isinstance(statement, ast.Pass):
            return
        name, value = _name(statement), statement.value  # type: ignore[attr-defined]
        calls = _calls_modules(statements, value)
        code = _value(statements, statement)
        is_first = self.side and not _is_before(statements, self.node, name)
        is_first = is_first and all(name in _names(x) for x in (self.node.body, self.node.orelse))
        if is_first or not _is_used_outside(statements, self.node, name):
            yield f"{name} = {text(code)}"
            return
        if not all(map(statements.is_array, statements.expressions.values(value))):
            raise NotTranscribed(f"the condition is an array, and {name} is none")
        other = ast.Name(name)
        pair = (code, other) if self.side else (other, code)
        template = "jnp.where({0}, {1}, {2})" if calls else _COND
        made = expr(template, ast.Name(self.holds), *pair)
        yield f"{name} = {text(made)}"


def _names(body: list[ast.stmt]) -> set[str]:
    """Returns the names that statements store."""
    nodes = (item for statement in body for item in ast.walk(statement))
    return {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


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
    return statements.code(number_of(test) or test)


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


def _calls_modules(statements: Statements, value: ast.expr) -> bool:
    """Returns whether a value calls modules of the model.

    Raises:
        NotTranscribed: It calls what may change the model, or functions of it, which may.
    """
    file, found = statements.expressions.file, False
    for call in (item for item in ast.walk(value) if isinstance(item, ast.Call)):
        events = statements.expressions.events(call)
        callees = [part.value for x in events if (part := x.parts.get(call.func)) is not None]
        for callee in {id(item): item for item in callees}.values():
            if file.recording.source.is_module(callee) and not _has_state(file, callee):
                found = True
            elif file.recording.source.is_module(callee) or file.recording.function_of(callee):
                what = ast.unparse(call.func)
                raise NotTranscribed(f"the condition is an array, and a side calls {what}")
    return found


def _has_state(file: Any, module: Any) -> bool:
    """Returns whether calls of a module may change it, beside what its layers draw."""
    return any(
        part._buffers or file.slots.names(file.maker_of(type(part)), file.maker_of)
        for part in module.modules()
    )


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
