"""Parameters and variables of a library's infrastructure that a file does without."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from torch import nn

from fmapper_translate.functions import Function
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.recording import Event, Recording


class Omissions:
    """Parameters, variables and arguments of a library's models that a file leaves out.

    Args:
        recording: What the source did.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._parameters: dict[Function, frozenset[str]] = {}

    def parameters(self, function: Function | None) -> frozenset[str]:
        """Returns the parameters of a function that no call of it gave anything."""
        if function is None or not library.is_library(function.module):
            return frozenset()
        if function not in self._parameters:
            self._parameters[function] = frozenset(self._find(function))
        return self._parameters[function]

    def constant(
        self, function: Function, node: ast.expr, events: Sequence[Event]
    ) -> ast.expr | None:
        """Returns the code for the constant that a variable or attribute always is, or None."""
        name = _name(node)
        if name not in library.LEFT_OUT or not library.is_library(function.module):
            return None
        values = [event.value for event in events] or self._loads(function, name)
        if not events and name in self.parameters(function) and not values:
            return ast.Constant(None)
        if values and all(map(library.is_nothing, values)) and len({*map(repr, values)}) == 1:
            return ast.Constant(values[0])
        return None

    def is_nothing(self, function: Function, target: ast.expr, events: Sequence[Event]) -> bool:
        """Returns whether an assignment gives such a variable or attribute its constant."""
        is_name = _name(target) in library.LEFT_OUT
        is_known = all(library.is_nothing(event.value) for event in events)
        return is_name and is_known and library.is_library(function.module)

    def left_out(self, function: Function, call: ast.Call, callee: Any) -> set[Any]:
        """Returns the arguments and keywords of a call that are only for a library."""
        if not library.is_library(function.module):
            return set()
        here = self.parameters(function)
        left: set[Any] = {key for key in call.keywords if self._is_left_out(function, key, here)}
        target = self._recording.function_of(
            getattr(type(callee), "forward", callee) if isinstance(callee, nn.Module) else callee
        )
        if target is not None and not any(isinstance(arg, ast.Starred) for arg in call.args):
            is_given = target.owner is not None and not target.is_static
            names = [item.arg for item in target.tree.args.args][is_given:]
            there = self.parameters(target)
            left |= {arg for name, arg in zip(names, call.args, strict=False) if name in there}
        return left

    def _is_left_out(self, function: Function, key: ast.keyword, here: frozenset[str]) -> bool:
        if key.arg is None:
            return isinstance(key.value, ast.Name) and key.value.id in here
        events = self._recording.events.get(key.value, [])
        if key.arg not in library.LEFT_OUT:
            return False
        values = [event.value for event in events]
        if isinstance(key.value, ast.Constant):
            values = [key.value.value]
        return all(map(library.is_nothing, values))

    def is_assigned(self, cls: type, name: str) -> bool:
        """Returns whether the source gives a class or its objects an attribute, not a library."""
        return (
            not library.is_library(cls.__module__)
            or hasattr(cls, name)
            or any(
                isinstance(node, ast.Attribute)
                and node.attr == name
                and isinstance(node.ctx, ast.Store)
                for function in self._recording.functions
                for node in function.nodes
            )
        )

    def is_read(self, name: str) -> bool:
        """Returns whether a function of the source reads an attribute of this name."""
        return any(
            isinstance(node, ast.Attribute) and node.attr == name
            for function in self._recording.functions
            for node in function.nodes
        )

    def _find(self, function: Function) -> list[str]:
        given = self._recording.arguments_of(function)
        args = function.tree.args
        names = [item.arg for item in (*args.args, *args.kwonlyargs)]
        left = [
            name
            for name in names
            if name in library.LEFT_OUT
            and all(library.is_nothing(value) and not value for value in given[name])
        ]
        rest = args.kwarg.arg if args.kwarg is not None else ""
        is_empty = all(
            key in library.LEFT_OUT and library.is_nothing(value) and not value
            for keywords in given[rest]
            for key, value in keywords.items()
        )
        if rest and is_empty and self._is_passed_on(function, rest):
            left.append(rest)
        return left

    def _is_passed_on(self, function: Function, name: str) -> bool:
        """Returns whether all that a function does with its keywords is to pass them on."""
        passed = [
            key.value
            for node in function.nodes
            if isinstance(node, ast.Call)
            for key in node.keywords
            if key.arg is None
        ]
        uses = [item for item in function.nodes if isinstance(item, ast.Name) and item.id == name]
        return all(item in passed for item in uses)

    def _loads(self, function: Function, name: str) -> list[Any]:
        return [
            event.value
            for node in function.nodes
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            for event in self._recording.events.get(node, ())
        ]


def _name(node: ast.expr) -> str:
    """Returns the name of a variable or attribute; empty for other expressions."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""
