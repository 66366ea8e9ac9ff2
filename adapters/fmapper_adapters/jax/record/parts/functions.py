"""Records calls of functions that take a container of a model's arrays as calls of submodules."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from fmapper.programs.reading import class_name
from fmapper_adapters.jax.record import closure, frames
from fmapper_adapters.jax.record.parts import calls


@contextlib.contextmanager
def watch_functions(root: Any, arrays: Iterable[Any]) -> Iterator[None]:
    """Records calls of functions among the globals of `root` that take arrays in a container.

    Args:
        root: The function, or a wrapper of it.
        arrays: The arrays of the model.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    held = {id(x): x for x in arrays}
    try:
        for space in _spaces(_plain(root)) if calls.is_noting() else ():
            for name, value in list(space.items()):
                function = _own_function(value)
                if function is not None:
                    changed.append((space, name, value))
                    space[name] = _wrap(function, held)
        yield
    finally:
        for space, name, value in changed:
            space[name] = value


def _plain(root: Any) -> types.FunctionType | None:
    while isinstance(root, functools.partial) or closure.unwrap(root) is not None:
        root = root.func if isinstance(root, functools.partial) else closure.unwrap(root)
    return root if isinstance(root, types.FunctionType) else None


def _own_function(value: Any) -> types.FunctionType | None:
    """Returns a global as a function if it is one of the user's, else None."""
    inner = closure.unwrap(value)
    inner = value if inner is None else inner
    if not isinstance(inner, types.FunctionType):
        return None
    file = inner.__code__.co_filename
    of_others = frames.is_of_jax(file) or frames.is_of_library(file) or frames.is_of_python(file)
    return None if of_others else inner


def _spaces(function: types.FunctionType | None) -> list[dict[str, Any]]:
    """Returns the globals of a function of the user's, and of the functions that these contain."""
    spaces: list[dict[str, Any]] = []
    function = _own_function(function)
    todo = [] if function is None else [function.__globals__]
    while todo:
        space = todo.pop()
        if any(space is other for other in spaces):
            continue
        spaces.append(space)
        inner = map(_own_function, space.values())
        todo += [other.__globals__ for other in inner if other is not None]
    return spaces


def _wrap(function: types.FunctionType, held: dict[int, Any]) -> Callable[..., Any]:
    """Wraps a function to record its calls with some of the model's arrays."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        at = next((key for key, value in given if _holds_some(value, held)), None)
        if at is None or not calls.is_noting():
            return function(*args, **kwargs)
        owner = dict(given)[at]
        stub = _without(function, at)
        if stub is None:
            return function(*args, **kwargs)

        def run(*rest: Any, **named: Any) -> Any:
            if isinstance(at, str):
                return function(*rest, **named, **{at: owner})
            return function(*rest[:at], owner, *rest[at:], **named)

        rest = tuple(argument for i, argument in enumerate(args) if i != at)
        named = {key: argument for key, argument in kwargs.items() if key != at}
        kind = f"{function.__module__}.{class_name(function.__name__)}"
        return calls.note_function(owner, stub, rest, named, run, _arrays_in(owner), kind)

    return call


def _holds_some(value: Any, held: dict[int, Any]) -> bool:
    if callable(value) or isinstance(value, jax.core.Tracer):  # calls of models are recorded anyway
        return False
    return any(id(array) in held for array in _arrays_in(value).values())


def _arrays_in(value: Any) -> dict[str, Any]:
    """Returns the arrays in a container that are being traced, by name."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if isinstance(leaf, jax.core.Tracer):
            arrays[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return arrays


def _without(function: types.FunctionType, at: int | str) -> Callable[..., Any] | None:
    """Returns a function with the signature of another minus a parameter; None if that is missing.

    Args:
        function: The function with the full signature.
        at: The number of the parameter, or its name.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
    number = names.index(at) if isinstance(at, str) and at in names else at
    if not isinstance(number, int) or number >= len(names):
        return None

    @functools.wraps(function)
    def stub(*args: Any, **kwargs: Any) -> None: ...

    kept = [parameter for parameter in parameters if parameter.name != names[number]]
    stub.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return stub


_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
