"""Reports calls of functions of a model's own code during a recording, such as `rope(q, cos)`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

# Packages whose functions belong to frameworks, not to models.
_FRAMEWORKS = {"torch", "numpy", "jax", "einops", "fmapper", "fmapper_adapters"}

# Called with the owner of a method or None, the name, the function and its arguments; returns a
# value for `End`, or None to skip `End`.
Begin = Callable[[torch.nn.Module | None, str, Callable[..., Any], Any, Any], Any]
End = Callable[[Any, Any], None]  # gets this value, and the result or None after an error


@contextlib.contextmanager
def watch(module: torch.nn.Module, begin: Begin, end: End) -> Iterator[None]:
    """Calls `begin` before and `end` after each call of the model's functions within the block.

    These are functions that the code of the model's classes calls by name, and the methods of these
    classes other than `forward`.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in [*_find(module), *_methods_of(module)]:
            before.append((owner, name, value))
            _set(owner, name, _wrap(name, value, begin, end, is_method=isinstance(owner, type)))
        yield
    finally:
        for owner, name, value in before:
            _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _wrap(name: str, value: Any, begin: Begin, end: End, *, is_method: bool) -> Any:
    if isinstance(value, staticmethod):
        return staticmethod(_wrap(name, value.__func__, begin, end, is_method=False))
    function: Callable[..., Any] = value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner = args[0] if is_method and args else None
        is_part = isinstance(owner, torch.nn.Module)
        noted = begin(owner if is_part else None, name, function, args, kwargs)
        if noted is None:
            return function(*args, **kwargs)
        result = None
        try:
            result = function(*args, **kwargs)
        finally:
            end(noted, result)
        return result

    return call


def _methods_of(module: torch.nn.Module) -> Iterator[tuple[type, str, Any]]:
    """Yields the methods of the model's classes other than `forward`."""
    classes = {cls for inner in module.modules() for cls in type(inner).__mro__}
    for cls in filter(_is_own, classes):
        for name, member in [*vars(cls).items()]:
            function = getattr(member, "__func__", member)
            is_own = not name.startswith("__") and name != "forward"
            is_called = isinstance(member, FunctionType | staticmethod)
            if is_own and is_called and isinstance(function, FunctionType) and _is_plain(function):
                yield cls, name, member


def _find(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, FunctionType]]:
    """Yields the functions that classes of a model call, each with its namespace and name."""
    classes = {cls for inner in module.modules() for cls in type(inner).__mro__}
    todo = [function for cls in classes if _is_own(cls) for function in _methods(cls)]
    seen = {id(function) for function in todo}
    yielded: set[tuple[int, str]] = set()
    while todo:
        function = todo.pop()
        for names, name, other in _find_called(function):
            if id(other) not in seen:
                seen.add(id(other))
                todo.append(other)
            if (id(names), name) not in yielded:
                yielded.add((id(names), name))
                yield names, name, other


def _methods(cls: type) -> Iterator[FunctionType]:
    for member in vars(cls).values():
        function = inspect.unwrap(getattr(member, "__func__", member))
        if isinstance(function, FunctionType):
            yield function


def _find_called(function: FunctionType) -> Iterator[tuple[dict[str, Any], str, FunctionType]]:
    """Yields the functions that a function refers to, each with its namespace and name."""
    inner: Any = inspect.unwrap(function)
    names = {*_names_in(inner.__code__)}
    spaces = [inner.__globals__]
    for name in names:
        value = inner.__globals__.get(name)
        if isinstance(value, ModuleType) and _is_of_a_model(value.__name__):
            spaces.append(vars(value))
    for space in spaces:
        for name in names:
            value = space.get(name)
            if isinstance(value, FunctionType) and _is_own(value) and _is_plain(value):
                yield space, name, value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_plain(function: FunctionType) -> bool:
    inner = inspect.unwrap(function)
    waits = inspect.isgeneratorfunction(inner) or inspect.iscoroutinefunction(inner)
    return isinstance(inner, FunctionType) and not waits


def _is_own(value: type | FunctionType) -> bool:
    return _is_of_a_model(value.__module__ or "")


def _is_of_a_model(name: str) -> bool:
    package = name.partition(".")[0]
    return package not in _FRAMEWORKS and package not in sys.stdlib_module_names
