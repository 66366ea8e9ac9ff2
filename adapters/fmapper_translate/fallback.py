"""Functions whose statements have no counterpart: their operations as statements, in order."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fmapper.translation import expr, literal, text
from fmapper_translate._private import has_computed_weights
from fmapper_translate.functions import Function
from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.operations import Operations
from fmapper_translate.printing.rows import picks_rows
from fmapper_translate.recording import Activation, Event, Operation, Recording
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.files import File

Path = tuple[Any, ...]


def operations_of(file: File, function: Function, reason: str) -> list[str]:
    """Returns the body of a method that computes what the source does, for each call of it.

    Args:
        file: The file.
        function: The method.
        reason: Why its statements are not those of the source; for a comment.

    Raises:
        NotTranscribed: An operation has no code, or another call ran others.
    """
    runs = [item for item in file.recording.activations if item.function is function]
    if any(picks_rows(step) for run in runs for step in run.log):
        raise NotTranscribed(reason)
    events = (x for node in function.nodes for x in file.recording.events.get(node, ()))
    try:
        for event in events:
            refuse_python_draw(file.recording, function, event)
            if isinstance(event.value, np.ndarray | np.generic):
                raise NotTranscribed("it computes with NumPy")
        bodies = {"\n".join(_Body(file, run).lines()) for run in runs if run.log}
    except (NotTranscribed, TypeError, AttributeError, LookupError, ValueError) as error:
        is_same = str(error) in reason
        raise NotTranscribed(reason if is_same else f"{reason}; and {error}") from None
    if len(bodies) != 1 or not file.is_module(function.owner):
        raise NotTranscribed(reason)
    reason = reason.removeprefix(f"{function.label}: ")
    return [f"# written by its operations: {reason}", *bodies.pop().splitlines()]


class _Body:
    def __init__(self, file: File, run: Activation) -> None:
        self._file = file
        self._run = run
        self._names: dict[int, str] = {}
        self._count = 0

    def lines(self) -> Iterator[str]:
        """Returns the statements."""
        for name, value in self._run.arguments.items():
            self._name(value, name)
        owner = self._run.arguments.get("self")
        for step in self._run.log:
            if isinstance(step, Operation):
                if isinstance(step.result, bool | int | float):
                    raise NotTranscribed(f"{step.name} makes a number of a tensor")
                if not isinstance(step.result, torch.Tensor | tuple | list):
                    continue  # as of profilers
                if step.writes_part:
                    raise NotTranscribed(f"{step.name} writes into a part of a tensor")
                self._count += 1
                name = f"x{self._count}"
                printer = Operations(self._file.dialect, [], self._tensors(owner), self._key)
                yield f"{name} = {text(printer.print([step], step.result))}"
                self._name(step.result, name)
            elif isinstance(step.value, torch.Tensor | tuple | list):
                self._count += 1
                yield f"x{self._count} = {text(self._call(step, owner))}"
                self._name(step.value, f"x{self._count}")
        yield f"return {text(self._value(self._run.result))}"

    def _name(self, value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            self._names[id(value)] = name
        elif isinstance(value, tuple | list):
            for at, item in enumerate(value):
                self._name(item, f"{name}[{at}]")

    def _tensors(self, owner: Any) -> dict[int, Any]:
        tensors = {key: functools.partial(expr, name) for key, name in self._names.items()}
        if isinstance(owner, nn.Module):
            for name, value in [*owner._parameters.items(), *owner._buffers.items()]:
                layer = self._file.layer_of(owner)
                key, order = layer.variable(name) if layer is not None else (name, None)
                if order is None:
                    code = functools.partial(
                        self._file.target.read, expr(f"self.{key}"), value, constructs=False
                    )
                    tensors.setdefault(id(value), code)
        return tensors

    def _key(self) -> ast.expr:
        return self._file.target.key(self._file, self._run.function)

    def _call(self, event: Event, owner: Any) -> ast.expr:
        assert isinstance(event.node, ast.Call)
        callee = event.parts[event.node.func].value
        refuse_wrapper(self._file.recording, callee, event)
        if isinstance(callee, nn.Module) and isinstance(owner, nn.Module):
            path = next((name for name, part in owner.named_modules() if part is callee), None)
            if path is None:
                raise NotTranscribed(f"{type(callee).__name__} is a part of another module")
            steps = [f"[{item}]" if item.isdigit() else f".{item}" for item in path.split(".")]
            func = expr(f"self{''.join(steps)}")
        else:
            function = self._file.recording.function_of(callee)
            if function is None:
                raise NotTranscribed(f"{ast.unparse(event.node.func)} has no counterpart")
            self._file.add_function(function)
            func = expr(self._file.marks.mark(function))
            if inspect.ismethod(callee):
                is_own = getattr(type(owner), function.name, None) is callee.__func__
                name = "__call__" if function.name == self._file.called else function.name
                func = expr(f"{'self' if is_own else 'super()'}.{name}")
        args = [self._value(event.parts[arg].value) for arg in event.node.args]
        keywords = [
            ast.keyword(key.arg, self._value(event.parts[key.value].value))
            for key in event.node.keywords
        ]
        target = callee if isinstance(callee, nn.Module) else function
        more = self._file.target.extras(self._file, self._run.function, target)
        return ast.Call(func, args, [*keywords, *more])

    def _value(self, value: Any) -> ast.expr:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._names:
                raise NotTranscribed("a tensor of it comes from nowhere")
            return expr(self._names[id(value)])
        if isinstance(value, tuple | list):
            return ast.Tuple([self._value(item) for item in value], ast.Load())
        try:
            return literal(value)
        except TypeError:
            raise NotTranscribed(f"it gives a {type(value).__name__}") from None


def dispatch_of(recording: Recording, module: nn.Module, event: Event | None) -> Function | None:
    """Returns the function that a library calls in place of a module's `forward`, if it does."""
    kind = type(module)
    is_own = not library.is_library(kind.__module__) or recording.function_of(kind.forward)
    if event is None or is_own:
        return None
    for run in recording.activations:
        if run.result is event.value and next(iter(run.arguments.values()), None) is module:
            return run.function
    return None


def refuse_python_draw(recording: Recording, function: Function, event: Event) -> None:
    """Refuses a call that draws a random number in Python, which a compiled model does once.

    Functions that run on the host each time may draw.
    """
    is_drawing = event.generator is not None and not runs_on_host(recording, function)
    if is_drawing:
        raise NotTranscribed("it draws a random number in Python, which a compiled model does once")


def runs_on_host(recording: Recording, function: Function) -> bool:
    """Returns whether a function computes an array of NumPy from numbers that NumPy draws.

    It does not take arrays of the model, so that a file can call it each time that its model runs.
    """
    events = (x for node in function.nodes for x in recording.events.get(node, ()))
    generators = [x.generator for x in events if x.generator is not None]
    runs = [run for run in recording.activations if run.function is function]
    return (
        bool(generators)
        and function.owner is None
        and all(item is np.random.rand.__self__ for item in generators)  # type: ignore[attr-defined]
        and all(isinstance(run.result, np.ndarray) for run in runs)
        and not any(_has_arrays(value) for run in runs for value in run.arguments.values())
    )


def _has_arrays(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return any(map(_has_arrays, values))
    return isinstance(value, torch.Tensor | nn.Module)


def refuse_wrapper(recording: Recording, callee: Any, event: Event | None) -> None:
    """Refuses a call of a function of the source that ran operations outside of its own code.

    Those are of a decorator or a hook, which the file does not have.
    """
    target = getattr(type(callee), "forward", None) if isinstance(callee, nn.Module) else callee
    if isinstance(callee, nn.Module) and has_computed_weights(callee):
        return  # the file's module does that
    if event is not None and event.operations and recording.function_of(target) is not None:
        names = ", ".join(dict.fromkeys(operation.name for operation in event.operations))
        raise NotTranscribed(f"a decorator or hook of it computes with tensors ({names})")
