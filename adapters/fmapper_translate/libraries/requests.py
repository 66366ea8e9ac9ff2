"""Expressions on configurations, and calls of a library's infrastructure."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from typing import TYPE_CHECKING, Any

from torch import nn

from fmapper.translation import expr, literal
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.recording import Event
from fmapper_translate.walk.errors import Unnamed

if TYPE_CHECKING:
    from fmapper_translate.expressions import Expressions


def print_field(expressions: Expressions, node: ast.Attribute, owner: Any, value: Any) -> ast.expr:
    """Returns the code for an attribute of a configuration."""
    if node.attr == library.SETTING:
        return literal(value)
    if callable(value):
        raise Unnamed(f"{node.attr} of a configuration")
    name = expressions.file.configs.field(owner, node.attr)
    return ast.Attribute(expressions.code(node.value), name, ast.Load())


def print_call(
    expressions: Expressions, node: ast.Call, callee: Any, event: Event | None
) -> ast.expr | None:
    """Returns the code for a call that asks a configuration or a library; None for others."""
    asked = None if event is None else _ask(expressions, node, callee, event)
    if asked is not None:
        return asked
    counterpart = library.counterpart_of(callee)
    if counterpart is not None:
        values = [part.value for part in event.parts.values()] if event is not None else []
        values += [item for value in values if isinstance(value, dict) for item in value.values()]
        for config in filter(library.is_config, values):
            if counterpart in library.FIELDS:
                expressions.file.configs.keep(config, library.FIELDS[counterpart])
        return expressions.plain_call(node, expressions.code(node.func), [])
    if event is not None and library.is_of_library(getattr(callee, "__module__", None) or ""):
        if _calls_its_module(callee) and isinstance(node.func, ast.Attribute):
            return expressions.plain_call(node, expressions.code(node.func.value), [])
        return _choice(expressions, node, event.value)
    return None


def _calls_its_module(method: Any) -> bool:
    """Returns whether what a method of a library returns is a call of its module."""
    if not isinstance(getattr(method, "__self__", None), nn.Module):
        return False
    last = textwrap.dedent(inspect.getsource(method)).rstrip().splitlines()[-1]
    return last.strip() == "return self(*args, **kwargs)"


def _ask(expressions: Expressions, node: ast.Call, callee: Any, event: Event) -> ast.expr | None:
    """Returns the code for `getattr` and `hasattr` of a configuration."""
    part = event.parts.get(node.args[0]) if node.args else None
    if callee not in (getattr, hasattr) or part is None or not library.is_config(part.value):
        return None
    name = node.args[1]
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return None
    is_there = hasattr(part.value, name.value)
    if callee is hasattr:
        return literal(is_there)
    if not is_there:
        return expressions.code(node.args[2])
    read = expressions.file.configs.field(part.value, name.value)
    return ast.Attribute(expressions.code(node.args[0]), read, ast.Load())


def _choice(expressions: Expressions, node: ast.Call, value: Any) -> ast.expr | None:
    """Returns the code for a function or model that a library chooses from the model's own."""
    file = expressions.file
    if isinstance(value, types.FunctionType | types.MethodType):
        function = file.recording.function_of(value)
        if function is None:
            raise Unnamed(f"{ast.unparse(node.func)} has no counterpart")
        file.add_function(function)
        return expr(file.marks.mark(function))
    if isinstance(value, nn.Module) and file.add(type(value)):
        more = [file.target.source()] * file.takes_rngs(type(value))
        config = _config_of(expressions, node.args[0], value)
        return ast.Call(expr(type(value).__name__), [config], more)
    return None


def _config_of(expressions: Expressions, node: ast.expr, model: Any) -> ast.expr:
    """Returns the code for the configuration of a part of a model: the model's, or one in it."""
    whole = expressions.values(node)[-1]
    inner = next((name for name, value in vars(whole).items() if value is model.config), None)
    if whole is model.config or inner is None:
        return expressions.code(node)
    name = expressions.file.configs.field(whole, inner)
    return ast.Attribute(expressions.code(node), name, ast.Load())
