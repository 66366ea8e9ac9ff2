"""Buffers of modules, and attributes that are settings first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from fmapper.translation import expr, text
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.expressions import Expressions
    from fmapper_translate.statements import Statements


def register_buffer(statements: Statements, call: ast.Call) -> Iterator[str]:
    """Prints `register_buffer`; nothing for what nobody reads or saves and has no counterpart.

    Raises:
        NotTranscribed: Its value has no counterpart.
    """
    expressions, file = statements.expressions, statements.expressions.file
    keywords = {key.arg: key.value for key in call.keywords}
    given = [*call.args, *keywords.values()]
    name, value = given[0], given[1]
    persistent = keywords.get("persistent", call.args[2] if len(call.args) > 2 else None)
    values = expressions.values(persistent) if persistent is not None else []
    is_saved = persistent is None or (
        persistent.value if isinstance(persistent, ast.Constant) else all(values)
    )
    try:
        code = expressions.code(value)
    except NotTranscribed:
        if is_saved or not isinstance(name, ast.Constant) or file.omissions.is_read(name.value):
            raise
        return
    made = file.target.array("buffer" if is_saved else "constant", code)
    if isinstance(value, ast.Constant) and value.value is None:
        made = expr("None")
    elif any(item is None for item in expressions.values(value)):
        made = expr("None if {0} is None else {1}", code, made)
    assert isinstance(call.func, ast.Attribute)
    if isinstance(name, ast.Constant):
        part = ast.Attribute(call.func.value, str(name.value), ast.Store())
        yield statements.set_value(part, made)
    else:
        note_names(expressions, call.func.value)
        owner = text(expressions.code(call.func.value))
        yield f"setattr({owner}, {text(expressions.code(name))}, {text(made)})"


def note_names(expressions: Expressions, owner: ast.expr) -> None:
    """Notes that a function sets attributes of an object by names that it computes.

    Raises:
        NotTranscribed: The target has only attributes that a class declares, and the object is not
            the function's own.
    """
    file, function = expressions.file, expressions.function
    is_own = function.is_method and isinstance(owner, ast.Name) and owner.id == "self"
    if file.target.is_tree and not is_own:
        raise NotTranscribed("attributes of another module are set by names that are computed")
    file.naming.add(function.owner)


def is_buffer(expressions: Expressions, base: ast.expr, name: str) -> bool:
    """Returns whether an attribute of an expression is a buffer of a module."""
    owners = expressions.values(base)
    return bool(owners) and all(
        isinstance(x, nn.Module) and name in dict(x.named_buffers(recurse=False)) for x in owners
    )


def is_setting_before(expressions: Expressions, target: ast.expr) -> bool:
    """Returns whether an attribute is a setting until it is given a module or an array."""
    return any(
        ast.unparse(item) == ast.unparse(target)
        for node in expressions.function.nodes
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        if isinstance(node.value, ast.Constant | ast.List)
        or any(value is None for value in expressions.values(node.value))
        for item in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
