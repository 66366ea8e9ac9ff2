"""Finds the library that a file of Python code belongs to, and what a frame is about to call.

A file belongs to the package that contains it.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

# Libraries written in JAX, whose lines are shown only if the user's code has none.
OF_FLAX_AND_ALIKE = ("flax", "equinox", "haiku", "optax")
_LOADS = ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
_OWN = ("fmapper", "fmapper_adapters")


def is_of(file: str, packages: tuple[str, ...]) -> bool:
    """Returns whether a file lies in the folder of one of these packages."""
    return file.startswith(tuple(folder for name in packages for folder in _folders(name)))


@functools.lru_cache(maxsize=4096)
def is_of_jax(file: str) -> bool:
    """Returns whether a file is part of JAX, of this library, or generated code."""
    return file.startswith("<") or is_of(file, ("jax", "jaxlib", *_OWN))


@functools.lru_cache(maxsize=4096)
def is_of_library(file: str) -> bool:
    """Returns whether a file is part of a library that is written in JAX."""
    return is_of(file, OF_FLAX_AND_ALIKE)


@functools.lru_cache(maxsize=4096)
def is_of_python(file: str) -> bool:
    """Returns whether a file is part of the standard library."""
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    return file.startswith(standard) and not file.startswith(
        (os.path.join(standard, "site-packages"), os.path.join(standard, "dist-packages"))
    )


@functools.cache
def _folders(package: str) -> tuple[str, ...]:
    """Returns the folders of a package, each ending with a separator; none if not installed."""
    return tuple(
        form + os.sep for place in _places(package) for form in {place, os.path.realpath(place)}
    )


def _places(package: str) -> Iterator[str]:
    loaded = sys.modules.get(package)
    if loaded is not None:
        yield from map(os.path.abspath, getattr(loaded, "__path__", ()))
        return
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return
    yield from map(os.path.abspath, (spec and spec.submodule_search_locations) or ())


def called_name(frame: FrameType) -> str | None:
    """Returns the name of the function that a frame is calling.

    Returns:
        The name, empty where it has none; None if the frame does something else.
    """
    done = [
        instruction
        for instruction in dis.get_instructions(frame.f_code)
        if instruction.offset <= frame.f_lasti
    ]
    if not done or "CALL" not in done[-1].opname:
        return None
    start = _start(done[-1])
    names = [
        instruction.argval
        for instruction in done[:-1]
        if instruction.opname in _LOADS and _start(instruction) == start
    ]
    return str(names[-1]) if names else ""


def _start(instruction: Any) -> tuple[Any, Any]:
    return instruction.positions.lineno, instruction.positions.col_offset


class TypeCalls:
    """Watches the running code for `type(x)`, which no method of `x` can answer.

    Within the `with` block, `sys.monitoring`, or `sys.settrace` on Python 3.11, reports each call
    in this thread. It watches nothing while a debugger uses these.

    Args:
        watches: Returns whether the code of a frame is of interest.
        tell: Receives the argument of such a call, and the frame.
    """

    def __init__(
        self, watches: Callable[[FrameType], bool], tell: Callable[[Any, FrameType], object]
    ) -> None:
        self._watch = _Monitored(watches, tell) if _MONITORS else _Traced(watches, tell)

    def __enter__(self) -> TypeCalls:
        self._watch.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.end()


_MONITORS = sys.version_info >= (3, 12)
_TOOLS = (3, 4)  # tool ids that `sys.monitoring` does not reserve


class _Monitored:
    """Watches through `sys.monitoring`, which reports calls with their callee."""

    def __init__(
        self, watches: Callable[[FrameType], bool], tell: Callable[[Any, FrameType], object]
    ) -> None:
        self._watches = watches
        self._tell = tell
        self._codes: dict[int, CodeType] = {}  # by id; keeping them here keeps ids unique
        self._monitoring: Any = vars(sys)["monitoring"]  # absent in Python 3.11

    def begin(self) -> None:
        """Begins to watch if a tool id is free."""
        monitoring, events = self._monitoring, self._monitoring.events
        self._thread = threading.get_ident()
        self._tool = next((tool for tool in _TOOLS if monitoring.get_tool(tool) is None), None)
        if self._tool is not None:
            monitoring.use_tool_id(self._tool, "fmapper")
            monitoring.register_callback(self._tool, events.PY_START, self._start)
            monitoring.register_callback(self._tool, events.CALL, self._call)
            monitoring.set_events(self._tool, events.PY_START)

    def end(self) -> None:
        """Watches no more."""
        if self._tool is None:
            return
        monitoring, events = self._monitoring, self._monitoring.events
        monitoring.set_events(self._tool, events.NO_EVENTS)
        for code in self._codes.values():
            monitoring.set_local_events(self._tool, code, events.NO_EVENTS)
        for event in (events.PY_START, events.CALL):
            monitoring.register_callback(self._tool, event, None)
        monitoring.free_tool_id(self._tool)

    def _start(self, code: CodeType, _: int) -> None:
        if id(code) in self._codes or threading.get_ident() != self._thread:
            return
        self._codes[id(code)] = code
        if "type" in code.co_names and self._watches(sys._getframe(1)):
            self._monitoring.set_local_events(self._tool, code, self._monitoring.events.CALL)

    def _call(self, code: CodeType, _: int, called: Any, argument: Any) -> None:
        if called is type and threading.get_ident() == self._thread:
            self._tell(argument, sys._getframe(1))


class _Traced:
    """Watches through `sys.settrace`, and finds arguments of `type` from the bytecode."""

    def __init__(
        self, watches: Callable[[FrameType], bool], tell: Callable[[Any, FrameType], object]
    ) -> None:
        self._watches = watches
        self._tell = tell
        self._calls: dict[int, tuple[CodeType, dict[int, list[Any]]]] = {}  # keeps the object alive

    def begin(self) -> None:
        """Begins to watch unless another tracer is set."""
        self._has_begun = sys.gettrace() is None
        if self._has_begun:
            sys.settrace(self._call)

    def end(self) -> None:
        """Watches no more."""
        if self._has_begun:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        entry = self._calls.get(id(frame.f_code))
        if entry is None:
            calls = _type_calls(frame.f_code) if self._watches(frame) else {}
            entry = self._calls[id(frame.f_code)] = frame.f_code, calls
        if not entry[1]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        steps = self._calls[id(frame.f_code)][1].get(frame.f_lasti) if event == "opcode" else None
        if steps is not None:
            for value in _follow(steps, frame):
                self._tell(value, frame)
        return self._instruction


_NAMES = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CONST")
_FILLERS = ("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP")


def _type_calls(code: CodeType) -> dict[int, list[Any]]:
    """Returns the offsets of calls `type(x)` in code, with the instructions that evaluate `x`."""
    if "type" not in code.co_names:
        return {}
    calls: dict[int, list[Any]] = {}
    steps: list[Any] | None = None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "type":
            steps = []
        elif steps is None or name in _FILLERS:
            continue
        elif name in _NAMES or (name == "LOAD_ATTR" and steps) or name == "BINARY_SUBSCR":
            steps.append((name, instruction.argval))
        else:
            if name == "CALL" and instruction.arg == 1 and steps:
                calls[instruction.offset] = steps
            steps = None
    return calls


def _follow(steps: list[Any], frame: FrameType) -> list[Any]:
    """Evaluates the argument of `type`: names, attributes of arrays, elements of tuples."""
    stack: list[Any] = []
    for name, argument in steps:
        if name == "LOAD_CONST":
            stack.append(argument)
        elif name == "BINARY_SUBSCR":
            if len(stack) < 2 or not isinstance(stack[-2], tuple | list | dict):
                return []
            index = stack.pop()
            try:
                stack.append(stack.pop()[index])
            except (LookupError, TypeError):
                return []
        elif name == "LOAD_ATTR":
            held = getattr(stack[-1], "__dict__", {})
            if argument not in ("shape", "size") and argument not in held:
                return []
            stack.append(getattr(stack.pop(), argument, None))
        else:
            names = frame.f_globals if name == "LOAD_GLOBAL" else frame.f_locals
            if argument not in names:
                return []
            stack.append(names[argument])
    return stack if len(stack) == 1 else []


_METHODS: weakref.WeakKeyDictionary[type, tuple[tuple[type, str], ...]] = (
    weakref.WeakKeyDictionary()
)


def methods_of(cls: type) -> tuple[tuple[type, str], ...]:
    """Returns the methods that count as calls of a part: `__call__`, all of users' classes."""
    methods = _METHODS.get(cls)
    if methods is None:
        methods = _METHODS[cls] = tuple(_find_methods(cls))
    return methods


def _find_methods(cls: type) -> Iterator[tuple[type, str]]:
    for owner in cls.__mro__:
        file = getattr(sys.modules.get(owner.__module__), "__file__", None) or "<"
        is_library = is_of_library(file) or is_of_python(file)
        for name, value in vars(owner).items():
            function = inspect.unwrap(value) if callable(value) else None
            if not isinstance(function, FunctionType) or isinstance(value, type):
                continue
            if name == "__call__" or not (is_library or name.startswith("_")):
                yield owner, name
