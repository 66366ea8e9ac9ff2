"""Routes the arguments of a call to the inputs of the program, once per kind of call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fmapper.programs import Program

_PLAIN = (type(None), bool, int, float, str)


class Routes:
    """A cache of calls that were checked, so that similar calls need no checks.

    Two calls are similar if they pass arrays of the same classes, shapes and dtypes, and the same
    other values, at the same places. The cache is used only for arguments that are not trees, and
    for programs without numbers that vary; so it has no more entries than there are compiled
    programs.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        users = [i for i in program.inputs if i.kind in ("user", "static")]
        self._arrays = [i for i, spec in enumerate(users) if spec.kind == "user"]
        self._possible = all(users[i].is_array() for i in self._arrays) and all(
            child.kind == "leaf" for part in program.in_spec.children for child in part.children
        )
        self._routes: dict[Any, tuple[int | str, ...]] = {}

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Finds the arrays among the arguments by a cached route; None if there is none."""
        if not self._routes:
            return None
        try:
            route = self._routes.get(_call_kind(args, kwargs))
        except TypeError:  # an argument without a hash, such as a list
            return None
        if route is None:
            return None
        return [args[at] if type(at) is int else kwargs[at] for at in route]  # type: ignore[index]

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Caches the route from a checked call to the inputs."""
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if not self._possible or not all(map(_is_known, given)):
            return
        if len(given) < len(self._arrays):  # some are computed, such as an omitted mask
            return
        leaves = self._program.bind(
            tuple(_mark(value, at) for at, value in enumerate(args)),
            {name: _mark(value, name) for name, value in kwargs.items()},
        )
        route = [leaves[i] for i in self._arrays]
        if all(isinstance(place, _Place) for place in route):
            self._routes[_call_kind(args, kwargs)] = tuple(place.at for place in route)


class _Place:
    """Stands for an argument, to find the input that it becomes."""

    def __init__(self, at: int | str) -> None:
        self.at = at


def _mark(value: Any, at: int | str) -> Any:
    return value if type(value) in _PLAIN else _Place(at)


def _is_known(value: Any) -> bool:
    """Returns whether checks of a value need only its type, shape and dtype."""
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer)
    return type(value) is np.ndarray or type(value) in _PLAIN


def _call_kind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not kwargs:
        return tuple([_kind(value) for value in args])
    kinds = tuple([(name, _kind(value)) for name, value in kwargs.items()])
    return tuple([_kind(value) for value in args]), kinds


def _kind(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    if type(value) is float:
        return float, repr(value)  # 0.0 == -0.0
    if shape is None:
        return type(value), value
    return type(value), shape, value.dtype
