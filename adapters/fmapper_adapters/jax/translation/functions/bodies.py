"""The methods of classes as functions: parts become calls of functions with their arrays."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from typing import Any

from fmapper import ConversionError
from fmapper.translation import expr, text
from fmapper_adapters.jax.translation.functions.things import Function, Thing, inside


def print_function(function: Function, method: Any, functions: Mapping[str, Function]) -> str:
    """Returns the function of a method.

    Args:
        function: The class.
        method: The method.
        functions: All classes of the file, by name.
    """
    body = _Body(function, functions)
    lines: list[str] = []
    for line in method.print_lines():
        lines += [line] if line.startswith("#") else body.lines(line)
    own = list(method.parameters)
    if function.has_arrays:
        own.insert(0, "params")
    header = f"def {function.name_of(method.name)}({', '.join(own)}):"
    return "\n".join([header, *(textwrap.indent(line, "    ") for line in lines)])


class _Body(ast.NodeTransformer):
    def __init__(self, function: Function, functions: Mapping[str, Function]) -> None:
        self._function = function
        self._functions = functions
        self._known = {"self": Thing(expr("self"), expr("params"), function)}

    def lines(self, code: str) -> list[str]:
        """Returns the statements for one."""
        found: list[ast.stmt] = []
        for statement in ast.parse(code).body:
            new = self.visit(statement)
            found += new if isinstance(new, list) else [new]
        for statement in found:
            left = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
            if "self" in left:
                raise ConversionError(
                    f"{self._function.cls.sketch.path or 'the model'}: {text(statement)!r} has no "
                    f"form as a function; translate to equinox or flax"
                )
        return [text(statement) for statement in found]

    def _find(self, node: ast.AST) -> Thing | None:
        """Returns the part of the model that code names."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._find(node.value)
            if owner is None:
                return None
            if owner.function is not None and node.attr not in owner.function.parts:
                return None
            return inside(owner, node.attr, self._functions)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self._find(node.value)
            items = owner.items(self._functions) if owner is not None else []
            index = node.slice.value
            return items[index] if isinstance(index, int) and index < len(items) else None
        return None

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Calls the function of a part, with its arrays and what it is told."""
        args = [self.visit(one) for one in node.args]
        keywords = [ast.keyword(one.arg, self.visit(one.value)) for one in node.keywords]
        method, target = "__call__", self._find(node.func)
        if target is None and isinstance(node.func, ast.Attribute):
            owner = self._find(node.func.value)
            methods = [one.name for one in owner.function.cls.sketch.methods] if (
                owner is not None and owner.function is not None) else []  # fmt: skip
            if node.func.attr in methods:
                method, target = node.func.attr, owner
        if target is None:
            return ast.Call(self.visit(node.func), args, keywords)
        if target.is_layer:
            assert isinstance(target.made, ast.Call)
            function, made = target.made.args
            arrays = [] if text(made) == "None" else [ast.keyword(None, target.arrays)]
            return ast.Call(function, args, [*arrays, *target.made.keywords, *keywords])
        if target.function is None:
            return ast.Call(self.visit(node.func), args, keywords)
        own = target.function
        first = [target.arrays] if own.has_arrays else []
        return ast.Call(expr(own.name_of(method)), [*first, *args], keywords)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Returns the code for an array."""
        found = self._find(node)
        if found is not None:
            return found.arrays
        return ast.Attribute(self.visit(node.value), node.attr, node.ctx)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Returns the code for an array in a list."""
        found = self._find(node)
        if found is not None:
            return found.arrays
        return ast.Subscript(self.visit(node.value), self.visit(node.slice), node.ctx)
