"""Calls in constructors: their arguments by name, and the calls that functions return."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

_DEEPEST = 4  # functions that call functions


def last_name(node: ast.expr | None) -> str:
    """Returns the last part of the name of a called function."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def find_function(call: ast.Call, space: Mapping[str, Any]) -> Any:
    """Looks up the function of a call among the names of a constructor's module."""
    function = space.get(call.func.id) if isinstance(call.func, ast.Name) else None
    return function if inspect.isfunction(function) else None


def resolve(call: ast.Call, space: Mapping[str, Any], kind: type | None = None) -> ast.Call:
    """Returns the call of a class to which calls of functions lead.

    Examples:
        >>> call = ast.parse("Conv(width, 3)", mode="eval").body
        >>> resolve(call, {"Conv": object}) is call
        True

    Args:
        call: The call.
        space: The values of the names in it.
        kind: The class of the result, whose call may also be an argument: `weight_norm(Conv(...))`.
    """
    bases = {base.__name__ for base in kind.__mro__} if kind is not None else set()
    for _ in range(_DEEPEST):
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Call) and last_name(first.func) in bases:
            call = first
        function = find_function(call, space)
        returned = _result(function, call) if function is not None else None
        if returned is None:
            break
        call, space = returned, function.__globals__
    return call


def bind(function: Any, call: ast.Call) -> list[tuple[str, ast.expr]]:
    """Returns the arguments of a call by the parameter names of its function or class."""
    given = _bind_all(function, call)
    return [(name, node) for name, node in given.items() if isinstance(node, ast.expr)]


def _bind_all(function: Any, call: ast.Call) -> Mapping[str, Any]:
    """Returns the arguments of a call by parameter name, including `*args` and `**kwargs`."""
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        return {}
    try:
        given = {key.arg: key.value for key in call.keywords if key.arg}
        receiver = (None,) if isinstance(function, type) else ()
        code = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        return inspect.signature(code).bind_partial(*receiver, *call.args, **given).arguments
    except (TypeError, ValueError):
        return {}


def defaults_of(function: Any) -> dict[str, int | float]:
    """Returns the defaults of a function's parameters that are numbers or flags.

    Examples:
        >>> defaults_of(lambda width, stride=1, kind="conv", bias=True: None)
        {'stride': 1, 'bias': True}
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if type(parameter.default) in (int, float, bool)
    }


def _result(function: Any, call: ast.Call) -> ast.Call | None:
    """Returns the call that a one-statement function returns, with its arguments substituted."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return None
    last = tree.body[-1] if isinstance(tree, ast.FunctionDef) else None
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Call):
        return None
    usual = {name: ast.Constant(value) for name, value in defaults_of(function).items()}
    given = {**usual, **_bind_all(function, call)}
    returned: ast.Call = _Put(given).visit(copy.deepcopy(last.value))
    return returned


class _Put(ast.NodeTransformer):
    """Substitutes the arguments of a call for the parameter names of its function."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._given.get(node.id, node)
        return value if isinstance(value, ast.expr) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        args: list[ast.expr] = []
        for arg in node.args:  # `Conv(*args, **kwargs)`
            rest = self._variadic(arg.value) if isinstance(arg, ast.Starred) else None
            args += rest if isinstance(rest, tuple) else [arg]
        keywords: list[ast.keyword] = []
        for key in node.keywords:
            more = None if key.arg else self._variadic(key.value)
            given = more.items() if isinstance(more, dict) else [(key.arg, key.value)]
            keywords += [ast.keyword(name, value) for name, value in given]
        node.args, node.keywords = args, keywords
        self.generic_visit(node)
        return node

    def _variadic(self, node: ast.expr) -> Any:
        return self._given.get(node.id) if isinstance(node, ast.Name) else None
