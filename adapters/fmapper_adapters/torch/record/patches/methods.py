"""Reports calls of methods of a model's parts during a recording, such as `part.encode(x)`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

# Packages whose functions belong to frameworks, not to models.
_FRAMEWORKS = {"torch", "numpy", "jax", "einops", "fmapper", "fmapper_adapters"}

# Called with the owner of a method, its name, the function and its arguments; returns a value for
# `End`, or None to skip `End`.
Begin = Callable[[torch.nn.Module, str, Callable[..., Any], Any, Any], Any]
End = Callable[[Any, Any], None]  # gets this value, and the result or None after an error


@contextlib.contextmanager
def watch(module: torch.nn.Module, begin: Begin, end: End) -> Iterator[None]:
    """Calls `begin` before and `end` after each call of a method of the model's classes.

    `forward` is not one of them.
    """
    before: list[tuple[type, str, Any]] = []
    try:
        for cls, name, value in [*_methods_of(module)]:
            before.append((cls, name, value))
            setattr(cls, name, _wrap(name, value, begin, end))
        yield
    finally:
        for cls, name, value in before:
            setattr(cls, name, value)


def _wrap(name: str, function: Callable[..., Any], begin: Begin, end: End) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_part = bool(args) and isinstance(args[0], torch.nn.Module)
        noted = begin(args[0], name, function, args, kwargs) if is_part else None
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
            is_method = not name.startswith("__") and name != "forward"
            inner: Any = inspect.unwrap(member) if isinstance(member, FunctionType) else None
            waits = inspect.isgeneratorfunction(inner) or inspect.iscoroutinefunction(inner)
            if is_method and isinstance(inner, FunctionType) and not waits:
                yield cls, name, member


def _is_own(value: type | FunctionType) -> bool:
    return _is_of_a_model(value.__module__ or "")


def _is_of_a_model(name: str) -> bool:
    package = name.partition(".")[0]
    return package not in _FRAMEWORKS and package not in sys.stdlib_module_names
