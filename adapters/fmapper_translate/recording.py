"""The table of a model's run: each expression of its source, its values and operations."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fmapper_translate._private import is_view, name_of_operation
from fmapper_translate.functions import (
    CHOICE,
    STATEMENT,
    VALUE,
    Function,
    codes_in,
    functions_that_run,
    instrument,
)
from fmapper_translate.sources import Source


@dataclass(eq=False, slots=True)
class Operation:
    """An ATen operation that ran.

    Attributes:
        overload: The operation.
        args: What it was given by position.
        kwargs: What it was given by keyword.
        result: What it gave.
    """

    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def writes_part(self) -> bool:
        """Whether it writes its result into a view, in the place of its first argument."""
        is_written = bool(self.args) and self.result is self.args[0]
        return is_written and isinstance(self.result, torch.Tensor) and is_view(self.result)

    @property
    def name(self) -> str:
        """Its name with the overload: `aten::add.Tensor`."""
        return name_of_operation(self.overload)


@dataclass(eq=False, slots=True)
class Event:
    """One evaluation of an expression.

    Attributes:
        node: The expression.
        value: What it gave.
        operations: Those that it ran itself, not within the expressions that it consists of.
        parts: The evaluations of these.
    """

    node: ast.AST
    value: Any
    operations: list[Operation]
    parts: dict[ast.AST, Event]

    @property
    def generator(self) -> Any:
        """The generator of Python's or NumPy's random numbers whose method it calls, or None."""
        func = self.parts.get(self.node.func) if isinstance(self.node, ast.Call) else None
        owner = getattr(func.value, "__self__", None) if func is not None else None
        return owner if isinstance(owner, _GENERATORS) else None


_GENERATORS = (np.random.RandomState, np.random.Generator, random.Random)


@dataclass(eq=False, slots=True)
class Activation:
    """One call of a function.

    Attributes:
        function: The function.
        arguments: Its parameters -> what it was given.
        log: The operations that it ran itself and the calls of functions of the source, in order.
        result: What it returned.
        snapshot: A copy of that, as it was then.
        is_random: Whether random numbers were drawn before that.
    """

    function: Function
    arguments: dict[str, Any]
    log: list[Operation | Event] = field(default_factory=list)
    result: Any = None
    snapshot: Any = None
    is_random: bool = False
    pending: list[Operation] = field(default_factory=list)
    last: dict[ast.AST, Event] = field(default_factory=dict)

    def repeat(self) -> object:
        """Calls the function again with the same arguments."""
        args, given = self.function.tree.args, self.arguments
        positional = [given[item.arg] for item in (*args.posonlyargs, *args.args)]
        keywords = {item.arg: given[item.arg] for item in args.kwonlyargs}
        more = given[args.vararg.arg] if args.vararg is not None else ()
        rest = given[args.kwarg.arg] if args.kwarg is not None else {}
        return self.function.target(*positional, *more, **keywords, **rest)


class Recording:
    """The table of what ran: expressions and statements of the source x their evaluations.

    Args:
        source: The framework of the model.

    Attributes:
        functions: The functions of the source that ran.
        activations: Their calls.
        made: How many of these were before the model was called; 0 until then.
        has_drawn: Whether the present call of the model has drawn random numbers.
        events: The evaluations of each expression; those of one value whose parts are the same, as
            in loops over numbers, once.
        names: The classes and functions of the file -> their names there.
        spare: The same for sides of conditions that were evaluated for their code alone.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.functions: list[Function] = []
        self.names: dict[Any, str] = {}
        self.events: dict[ast.AST, list[Event]] = defaultdict(list)
        self.spare: dict[ast.AST, list[Event]] = defaultdict(list)
        self._is_spare = False
        self._turned: ast.AST | None = None
        self._is_paused = False
        self.operations: list[Operation] = []
        self.activations: list[Activation] = []
        self.made = 0
        self.has_drawn = False
        self._nodes: list[ast.AST] = []
        self._parts: dict[ast.AST, list[ast.AST]] = {}
        self._owners: set[ast.AST] = set()  # whose methods and attributes are read
        self._again: dict[tuple[Any, ...], Event] = {}
        self._codes: dict[types.CodeType, Function] = {}
        self._frames: dict[types.FrameType, Activation] = {}

    def function_of(self, target: Any) -> Function | None:
        """Returns the function of the source that is called by calling this, if it ran."""
        target = getattr(target, "__func__", target)
        target = inspect.unwrap(target) if callable(target) else target
        return next((item for item in self.functions if item.target is target), None)

    def arguments_of(self, function: Function) -> dict[str, list[Any]]:
        """Returns the parameters of a function -> what its calls gave them."""
        given: dict[str, list[Any]] = defaultdict(list)
        for activation in self.activations:
            for name, value in (
                activation.arguments.items() if activation.function is function else ()
            ):
                given[name].append(value)
        return given

    def watch(self, functions: Sequence[Function]) -> Iterator[None]:
        """Records what these functions do while the generator is suspended."""
        self.functions = list(functions)
        codes = {}
        for function in functions:
            code = instrument(function, self._number)
            codes[function.target] = function.target.__code__
            self._codes.update(dict.fromkeys(codes_in(code), function))
            function.target.__code__ = code
        spaces = [function.target.__globals__ for function in functions]
        for space in spaces:
            space |= {VALUE: self._value, STATEMENT: self._statement, CHOICE: self._choice}
        try:
            with self.source.watch(self._operation):
                yield
        finally:
            for target, code in codes.items():
                target.__code__ = code
            for space in spaces:
                for name in (VALUE, STATEMENT, CHOICE):
                    space.pop(name, None)
            self._frames.clear()

    def _number(self, node: ast.AST) -> int:
        self._nodes.append(node)
        self._parts[node] = list(_parts_of(node))
        if isinstance(node, ast.Attribute):
            self._owners.add(node.value)
        return len(self._nodes) - 1

    def _activation(self, frame: types.FrameType) -> Activation:
        activation = self._frames.get(frame)
        if activation is None:
            code = frame.f_code
            count = code.co_argcount + code.co_kwonlyargcount
            more = bool(code.co_flags & inspect.CO_VARARGS) + bool(
                code.co_flags & inspect.CO_VARKEYWORDS
            )
            names = code.co_varnames[: count + more]
            given = {
                name: _copy_list(frame.f_locals[name]) for name in names if name in frame.f_locals
            }
            activation = Activation(self._codes[code], given)
            self._frames[frame] = activation
            outer = self._outer(frame)
            if outer is not None:
                activation.log = self._activation(outer).log
            elif code.co_name == activation.function.name and not self._is_spare:
                self.activations.append(activation)
        return activation

    def _outer(self, frame: types.FrameType) -> types.FrameType | None:
        """Returns the call of the function in which a lambda, comprehension or the like runs.

        None for a frame of the function itself, and where that has returned.
        """
        function, outer = self._codes[frame.f_code], frame.f_back
        if frame.f_code.co_name == function.name:
            return None
        while outer is not None:
            if self._codes.get(outer.f_code) is function:
                return self._outer(outer) or outer
            outer = outer.f_back
        return None

    def _value(self, number: int, value: Any) -> Any:
        frame = sys._getframe(1)
        activation, node = self._activation(frame), self._nodes[number]
        last = activation.last
        parts = {part: last[part] for part in self._parts[node] if part in last}
        event, key, is_owner = None, None, node in self._owners
        if not (activation.pending or self._is_spare):
            key = _key_of(node, value, parts, is_owner=is_owner)
            event = self._again.get(key) if key is not None else None
        if event is None:
            kept = self.source.plain(value if is_owner else _copy_list(value))
            event = Event(node, kept, activation.pending, parts)
            activation.pending = []
            (self.spare if self._is_spare else self.events)[node].append(event)
            if key is not None:
                self._again[key] = event
        last[node] = event
        self.has_drawn |= event.generator is not None
        if node in activation.function.returns:
            self._is_paused = True
            activation.result, activation.snapshot = value, _snapshot(value)
            self._is_paused = False
            activation.is_random = self.has_drawn
        callee = (
            parts[node.func].value if isinstance(node, ast.Call) and node.func in parts else None
        )
        if self.source.is_module(callee) or (callee is not None and self.function_of(callee)):
            del activation.log[len(activation.log) - len(event.operations) :]
            activation.log.append(event)
        is_made = isinstance(node, ast.Call) and isinstance(callee, type | functools.partial)
        is_made = is_made and (not self.made or self.source.draws_values(value))
        if is_made and self.source.is_made_of_layers(value):
            self._note_maker(frame)
        return not value if node is self._turned else value

    def turn_conditions(self) -> None:
        """Calls functions again with conditions that were always the same the other way round.

        What the other side then runs is spare: it tells the code of that side.
        """
        first: dict[Function, Activation] = {}
        for activation in self.activations[self.made :]:
            first.setdefault(activation.function, activation)
        for function, activation in first.items():
            for test, *sides in _conditions(function) if not function.makes_modules else ():
                if self._is_constant(test) and self._is_unknown(
                    sides[bool(self.events[test][0].value)]
                ):
                    self._turned, self._is_spare = test, True
                    with contextlib.suppress(Exception):  # the side may be for other arguments
                        activation.repeat()
                    self._turned, self._is_spare = None, False

    def _is_unknown(self, side: Sequence[ast.AST]) -> bool:
        """Returns whether code has something that has not run, and that does not only raise."""
        return any(
            isinstance(node, ast.Call | ast.Subscript | ast.BinOp | ast.Attribute)
            and node not in self.events
            and node not in self.spare
            for item in side
            if not isinstance(item, ast.Raise)
            for node in ast.walk(item)
        )

    def _is_constant(self, test: ast.expr) -> bool:
        return len({bool(event.value) for event in self.events.get(test, ())}) == 1

    def _choice(
        self, number: int, test: Any, then: Callable[[], Any], other: Callable[[], Any]
    ) -> Any:
        chosen = then() if test else other()
        function = self._activation(sys._getframe(1)).function
        if function.name == "__init__" or function.makes_modules:
            before, self._is_spare = self._is_spare, True
            with contextlib.suppress(Exception):  # it may be wrong in this case, and has no effect
                (other if test else then)()
            self._is_spare = before
        return chosen

    def _note_maker(self, frame: types.FrameType | None) -> None:
        while frame is not None:
            if frame.f_code in self._codes:
                self._codes[frame.f_code].makes_modules = True
                # Who calls a lambda gives it no random numbers: it has those of its function.
                frame = self._outer(frame) or frame
            if frame.f_code in self._codes:
                self._codes[frame.f_code].makes_modules = True
            frame = frame.f_back

    def _statement(self, number: int) -> None:
        activation = self._activation(sys._getframe(1))
        if activation.pending:
            activation.pending = []

    def _operation(self, *what: Any) -> None:
        if self._is_paused:
            return
        operation = Operation(*what)
        self.operations.append(operation)
        frame: types.FrameType | None = sys._getframe(2)
        if self.source.draws(operation):
            self.has_drawn = True
            if not self.made:
                self._note_maker(frame)
        while frame is not None and frame.f_code not in self._codes:
            frame = frame.f_back
        if frame is not None:
            activation = self._activation(frame)
            activation.pending.append(operation)
            activation.log.append(operation)


def _conditions(
    function: Function,
) -> Iterator[tuple[ast.expr, Sequence[ast.AST], Sequence[ast.AST]]]:
    """Returns the conditions of a function, the code that runs if they hold, and if not."""
    after: dict[ast.AST, list[ast.stmt]] = {}
    for node in function.nodes:
        for body in (getattr(node, name, None) for name in ("body", "orelse")):
            if isinstance(body, list):
                after |= {item: body[at + 1 :] for at, item in enumerate(body)}
        match node:
            case ast.If(test, then, other):
                rest = after[node] if isinstance(then[-1], ast.Return) else []
                yield test, then, [*other, *rest]
            case ast.IfExp(test, then, other):
                yield test, [then], [other]
            case ast.BoolOp(op, values):
                for at, value in enumerate(values[:-1]):
                    more = values[at + 1 :]
                    yield (value, more, []) if isinstance(op, ast.And) else (value, [], more)


def _key_of(
    node: ast.AST, value: Any, parts: dict[ast.AST, Event], *, is_owner: bool
) -> tuple[Any, ...] | None:
    """Returns what evaluations that give the same number of the same parts have in common."""
    of_value: Any
    match value:
        case tuple():
            of_value = tuple((type(item), repr(item)) for item in value if type(item) in _PLAIN)
            if len(of_value) < len(value):
                return None
        case types.BuiltinFunctionType():
            of_value = id(value.__self__), value.__name__
        case types.ModuleType() | np.ufunc():
            of_value = id(value)
        case dict() | list() if is_owner or isinstance(value, dict):  # as they are later
            of_value = id(value)
        case _ if type(value) in _PLAIN:
            of_value = repr(value) if type(value) is float else value
        case _:
            return None
    return (node, type(value), of_value, *map(id, parts.values()))


_PLAIN = (bool, int, float, str, type(None))


def _copy_list(value: Any) -> Any:
    """Returns a list as it is now, since it may grow; another value itself."""
    return [*value] if type(value) is list else value


def _snapshot(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_snapshot(item) for item in value]
    if isinstance(value, dict):
        return {name: _snapshot(item) for name, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """Returns the expressions that one consists of, through what has no value itself."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr) and not isinstance(part, ast.Starred | ast.Slice):
            yield part
            if isinstance(part, ast.Tuple):
                yield from _parts_of(part)
        elif isinstance(part, ast.Starred | ast.Slice | ast.keyword):
            yield from _parts_of(part)


def record(
    source: Source,
    make: Callable[[], Any],
    calls: Sequence[Callable[[Any], object]],
    *,
    only_evaluation: bool = False,
) -> tuple[Recording, Any]:
    """Makes a model, calls it in evaluation, then in training, and returns what its source did.

    Args:
        source: The framework of the model.
        make: Returns the model.
        calls: Call it, each with other inputs.
        only_evaluation: Do not call it in training.
    """
    made: list[Any] = []
    recording = Recording(source)

    def run() -> None:
        model = make()
        made.append(model)
        recording.made = len(recording.activations)
        modes = ("eval",) if only_evaluation else ("eval", "train")
        for mode in modes:
            getattr(model, mode, int)()
            for call in calls:
                recording.has_drawn = False
                call(model)
        for mode in modes if recording.functions and source.turns else ():
            getattr(model, mode, int)()
            recording.turn_conditions()

    with source.compute():
        functions = functions_that_run(run, lambda: source.classes(made[0]))
    compiles = source.compiles(made[0])
    if compiles:  # what it has compiled before has not run
        with source.compute(compiles=True):
            functions = functions_that_run(run, lambda: source.classes(made[0]))
    watch = contextlib.contextmanager(recording.watch)
    with source.compute(compiles=compiles), watch(functions):
        run()
    return recording, made[-1]
