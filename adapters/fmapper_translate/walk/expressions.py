"""Expressions of the source as code: their text, with names and calls of another framework."""

from __future__ import annotations

import ast
import builtins
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fmapper.translation import expr, literal, text
from fmapper_translate.functions import Function
from fmapper_translate.printing import choices
from fmapper_translate.printing.folding import fold
from fmapper_translate.recording import Event
from fmapper_translate.walk.errors import NotTranscribed, Unnamed, Varied

if TYPE_CHECKING:
    from fmapper_translate.walk.files import File

_SIMPLE = bool | int | float | str | None
_ON_NUMBERS = ast.BinOp | ast.UnaryOp | ast.Compare | ast.Subscript | ast.Tuple | ast.Call
_ON_NUMBERS |= ast.Attribute  # a method of a list


def kind_of_numbers(value: Any) -> Any:
    """Returns the type of a number or of several in a tuple, or a function of Python's itself."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__name__, id(value.__self__)
    kind = type(value)
    if kind is tuple:
        kinds = tuple(map(kind_of_numbers, value))
        return None if None in kinds else kinds
    if kind in (dict, list, np.ufunc):
        return id(value)
    return kind if kind in (bool, int, float, type(None)) or issubclass(kind, np.generic) else None


class Expressions(ABC):
    """Prints the expressions of one function.

    Args:
        file: The file.
        function: The function.

    Attributes:
        new_names: Names of methods -> those in the file.
    """

    new_names: ClassVar[Mapping[str, str]]

    def __init__(self, file: File, function: Function) -> None:
        self.file: Any = file
        self.function = function
        self._events = file.recording.events
        self._codes: dict[ast.AST, ast.expr] = {}
        self._bound = {
            node.id for node in function.nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        } | {node.arg for node in function.nodes if isinstance(node, ast.arg)} | {
            node.name for node in function.nodes[1:] if isinstance(node, ast.FunctionDef)
        }  # fmt: skip

    def binds(self, node: ast.expr) -> bool:
        """Returns whether the function has a variable or parameter that an expression names."""
        return any(isinstance(x, ast.Name) and x.id in self._bound for x in ast.walk(node))

    def code(self, node: ast.expr) -> ast.expr:
        """Returns the code for an expression, the same for all its evaluations.

        Raises:
            NotTranscribed: There is none, or another one for another evaluation.
        """
        if node not in self._codes:
            self._codes[node] = self._code(node)
        return literal(self._codes[node])

    def events(self, node: ast.expr) -> list[Event]:
        """Returns the evaluations of an expression; those for its code alone without others."""
        return self._events.get(node) or self.file.recording.spare.get(node, [])

    def values(self, node: ast.expr) -> list[Any]:
        """Returns the values that an expression had."""
        return [event.value for event in self.events(node)]

    def callee(self, call: ast.Call) -> Any:
        """Returns what a call calls; None if that is known only when it runs, and it did not."""
        events = self.events(call)
        part = events[0].parts.get(call.func) if events else None
        return part.value if part is not None else self.static(call.func)[1]

    def call_of(self, call: ast.Call, callee: Any) -> ast.expr:
        """Returns the code for a call that the source makes through another function."""
        return self._call(call, callee, None)

    def _code(self, node: ast.expr) -> ast.expr:
        events = self.events(node)
        if isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.JoinedStr):
            return self._message(node)
        if isinstance(node, ast.Starred | ast.Slice):
            return self._copy(node)
        constant = self._constant(node, events)
        if constant is not None:
            return constant
        if not events:
            return self._unseen(node)
        printed: dict[str, ast.expr] = {}
        try:
            for event in self._distinct(node, events):
                made = self._print(node, event)
                printed.setdefault(text(made), made)
        except Unnamed:
            values = {repr(event.value) for event in events}
            is_choice = isinstance(node, ast.IfExp | ast.BoolOp)
            if len(values) == 1 and isinstance(events[0].value, _SIMPLE) and not is_choice:
                return literal(events[0].value)
            raise
        except NotTranscribed as error:
            raise self._at(node, str(error)) from None
        except (TypeError, AttributeError, IndexError, ValueError, KeyError) as error:
            raise self._at(node, f"{type(error).__name__}: {error}") from error
        if len(printed) > 1:
            raise Varied(str(self._at(node, "it is " + " and ".join(list(printed)[:2]))))
        return next(iter(printed.values()))

    def _distinct(self, node: ast.expr, events: list[Event]) -> list[Event]:
        """Returns evaluations without those that differ from others in numbers alone.

        The code for a sum or an element is the same for all numbers.
        """
        is_local = isinstance(node, ast.Name) and node.id in self._bound
        if not is_local and not isinstance(node, _ON_NUMBERS):
            return events
        first: dict[Any, Event] = {}
        for event in events:
            parts = [part.value for part in event.parts.values()]
            kinds = [*map(kind_of_numbers, (event.value, *parts))]
            is_same = not event.operations and None not in kinds
            first.setdefault(tuple(kinds) if is_same else event, event)
        return [*first.values()]

    def _message(self, node: ast.JoinedStr) -> ast.expr:
        """Returns an f-string with the code for what is in it; as it is if that has none."""
        try:
            values = [
                ast.FormattedValue(self.code(item.value), item.conversion, item.format_spec)
                if isinstance(item, ast.FormattedValue)
                else item
                for item in node.values
            ]
        except NotTranscribed:
            return node
        return ast.JoinedStr(values)

    def _at(self, node: ast.expr, reason: str) -> NotTranscribed:
        place = f"{self.function.label}: `{ast.unparse(node)}`"
        return NotTranscribed(
            reason if reason.startswith(self.function.label) else f"{place}: {reason}"
        )

    def _unseen(self, node: ast.expr) -> ast.expr:
        """Returns the code for an expression that did not run, if its text says all."""
        match node:
            case ast.Name() if node.id in self._bound:
                return node
            case ast.Name() | ast.Attribute():
                known, value = self.static(node)
                if known:
                    return self.reference(node, value)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    return ast.Attribute(self.code(node.value), node.attr, ast.Load())
                raise self._at(node, "it did not run")
            case ast.Call():
                known, value = self.static(node)
                if known:
                    return literal(value)
                known, value = self.static(node.func)
                if known:
                    return self._call(node, value, None)
                if isinstance(node.func, ast.Name):  # which is given, and is then code of the file
                    return self.plain_call(node, node.func, [])
                raise self._at(node, "it did not run")
        return self._copy(node)

    def static(self, node: ast.expr) -> tuple[bool, Any]:
        """Returns whether an expression is a global name or in one, and its value."""
        if isinstance(node, ast.Name) and node.id not in self._bound:
            space = self.function.target.__globals__
            if node.id in space or hasattr(builtins, node.id):
                return True, space.get(node.id, getattr(builtins, node.id, None))
        if isinstance(node, ast.Attribute):
            known, value = self.static(node.value)
            if known and hasattr(value, node.attr):
                return True, getattr(value, node.attr)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "hasattr"
        ):
            known, value = self.static(node.args[0])
            if known and isinstance(value, types.ModuleType):
                return True, hasattr(value, ast.literal_eval(node.args[1]))
        return False, None

    def _copy(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Lambda) and not any(x in self._events for x in ast.walk(node.body)):
            try:
                return self._rebuild(node)  # type: ignore[no-any-return]
            except NotTranscribed:
                return expr("not_written")
        made = choices.print_choice(self, node)
        if made is not None:
            return made
        whole: ast.expr = self._rebuild(node)
        return fold(whole)

    def _rebuild(self, node: Any) -> Any:
        """Returns a copy of a node with the code for its parts."""

        def turn(value: Any) -> Any:
            if isinstance(value, list):
                return [turn(item) for item in value]
            if isinstance(value, ast.expr):
                stored = isinstance(getattr(value, "ctx", None), ast.Store)
                return value if stored else self.code(value)
            if isinstance(value, ast.comprehension | ast.keyword):
                return self._rebuild(value)
            return value

        return type(node)(**{name: turn(value) for name, value in ast.iter_fields(node)})

    def plain_call(
        self,
        node: ast.Call,
        func: ast.expr,
        more: Sequence[ast.keyword] = (),
        code: Callable[[ast.expr], ast.expr] | None = None,
    ) -> ast.Call:
        """Returns a call with its arguments, but those that a file does without."""
        left, code = self._left_out(node), code or self.code
        keywords = [
            ast.keyword(key.arg, code(key.value)) for key in node.keywords if key not in left
        ]
        args = [code(arg) for arg in node.args if arg not in left]
        return ast.Call(func, args, [*keywords, *more])

    def _left_out(self, node: ast.Call) -> set[ast.AST]:
        """Returns the arguments and keywords of a call that a file does without."""
        left: set[ast.AST] = {arg for arg in node.args if self.is_left_out(arg)}
        return left | {key for key in node.keywords if self.is_left_out(key.value)}

    def is_left_out(self, node: ast.expr | None) -> bool:
        """Returns whether an expression always is something that a file does without."""
        values = self.values(node) if node is not None else []
        return bool(values) and all(map(self.has_no_counterpart, values))

    # --- what depends on the framework ------------------------------------------------------------

    @abstractmethod
    def has_no_counterpart(self, value: Any) -> bool:
        """Returns whether something is what a file does without: where arrays are, as a device."""

    def _constant(self, node: ast.expr, events: list[Event]) -> ast.expr | None:
        """Returns the constant that stands for an expression, if one does."""
        return None

    @abstractmethod
    def reference(self, node: ast.expr, value: Any) -> ast.expr:
        """Returns the code for something that a module defines."""

    @abstractmethod
    def _attribute(self, node: ast.Attribute, event: Event) -> ast.expr:
        """Returns the code for an attribute."""

    @abstractmethod
    def _call(self, node: ast.Call, callee: Any, event: Event | None) -> ast.expr:
        """Returns the code for a call."""

    @abstractmethod
    def _subscript(self, node: ast.Subscript, event: Event) -> ast.expr:
        """Returns the code for an element or a part of something."""

    def _print(self, node: ast.expr, event: Event) -> ast.expr:
        match node:
            case ast.Name():
                return node if node.id in self._bound else self.reference(node, event.value)
            case ast.Attribute():
                return self._attribute(node, event)
            case ast.Call():
                func = event.parts.get(node.func)
                return self._call(node, func.value if func is not None else None, event)
            case ast.Subscript():
                return self._subscript(node, event)
        return self._copy(node)
