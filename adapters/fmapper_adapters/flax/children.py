"""Sorts the attributes of a module into children and settings."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fmapper import no_gradient
from fmapper.backends import NodeType, is_dynamic
from fmapper_adapters.jax.libraries import registered_type

_CONTAINERS = (dict, list, tuple, deque)
_SETTINGS = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    np.generic,  # static values in Flax, like Python's numbers
    np.dtype,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
)
_PLAIN = frozenset({int, float, bool, str, type(None), type})
_CONVERTED = __name__.rpartition(".")[0] + "."  # the programs of a converted model
_WITH_PARTS = (types.FunctionType, types.MethodType, functools.partial)


class ChildTest:
    """Tests whether an attribute is a child; cached by class where the class decides.

    Children are arrays, nodes, and containers that hold one of those at any depth. The closure of a
    function does not count: movers refuse arrays in it.

    Args:
        own: For a class of the framework itself: True, False, or a test of the instance.
    """

    def __init__(self, decide: Callable[[type], bool | Callable[[Any], bool] | None]) -> None:
        self._decide = decide
        self.known: dict[type, bool] = {}

    def __call__(self, value: Any) -> bool:
        """Returns whether the value is a child."""
        cls = type(value)
        is_child = self.known.get(cls)
        if is_child is not None:
            return is_child
        if value is no_gradient:
            return True
        decision = self._decide(cls)
        if decision is not None and not isinstance(decision, bool):
            return decision(value)
        if decision is None and issubclass(cls, _CONTAINERS):
            return self._any_in(value)
        if decision is None and not issubclass(cls, _SETTINGS):
            if not is_dynamic(value):
                return False  # not cached: the class may be registered later
            decision = True
        self.known[cls] = bool(decision)
        return bool(decision)

    def _any_in(self, container: Any) -> bool:
        seen: dict[int, Any] = {}
        todo = [container]
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, _CONTAINERS) and self._decide(type(value)) is None:
                todo.extend(value.values() if isinstance(value, dict) else value)
            elif self(value):
                return True
        return False


def carried_attributes(attributes: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the attributes that are not children but may hold an array."""
    return [pair for pair in attributes if type(pair[1]) not in _PLAIN and not _is_plain(pair[1])]


def _is_plain(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return not value.__closure__ and not vars(value) and all(map(_is_plain, defaults))
    if type(value).__module__.startswith(("optax.", _CONVERTED)):
        return True  # their arrays are constants
    return isinstance(value, _SETTINGS) and not isinstance(value, _WITH_PARTS)


def box_type(cls: type, key: str, box_key: Any) -> NodeType | None:
    """Returns the node type of a box in JAX's registry, with a `BoxKey` for its content."""
    registered = registered_type(cls)
    if registered is None:
        return None

    def children(node: Any) -> dict[Any, Any]:
        contents = registered.children(node)
        return {box_key if name == key else name: child for name, child in contents.items()}

    return NodeType(children, registered.rebuild, static=registered.static)
