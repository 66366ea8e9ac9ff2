"""Modules among the arguments of a constructor, which a file makes where they are given."""

from __future__ import annotations

import dis
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fmapper_translate.constructors.arguments import find_arguments
from fmapper_translate.constructors.notes import arguments_of
from fmapper_translate.targets import layers
from fmapper_translate.walk.errors import NotTranscribed


@dataclass(frozen=True, eq=False)
class Construction:
    """The class of a module, what its constructor is given, and attributes that it got later."""

    cls: type
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def take_apart(value: Any, seen: set[int]) -> Any:
    """Returns an argument with constructions in the place of modules.

    Args:
        value: The argument.
        seen: The identities of the modules before it, to which its own are added.

    Raises:
        NotTranscribed: A module is given twice, or does not say how it was made.
    """
    if not isinstance(value, nn.Module):
        return _map(lambda item: take_apart(item, seen), value)
    if id(value) in seen:
        raise NotTranscribed(f"{type(value).__name__} is given twice to constructors")
    seen.add(id(value))
    args, kwargs = _arguments(value)
    args = [take_apart(item, seen) for item in args]
    kwargs = {name: take_apart(item, seen) for name, item in kwargs.items()}
    return Construction(type(value), args, kwargs, _later_attributes(value))


def put_together(value: Any) -> Any:
    """Returns an argument with new modules in the place of constructions."""
    if not isinstance(value, Construction):
        return _map(put_together, value)
    made = value.cls(*map(put_together, value.args), **_map(put_together, dict(value.kwargs)))
    for name, item in value.attributes.items():
        setattr(made, name, item)
    return made


def _later_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the numbers and texts of a module that none of its methods gives it."""
    kind: Any = type(module)
    known = _attributes_of(kind) | vars(nn.Module()).keys()
    plain = int | float | str
    return {
        name: item
        for name, item in vars(module).items()
        if name not in known and isinstance(item, plain)
    }


@functools.cache
def _attributes_of(cls: type) -> frozenset[str]:
    """Returns the names of the attributes that code of a class gives objects."""
    methods = (vars(base).get(name) for base in cls.__mro__ for name in vars(base))
    codes = [inspect.unwrap(item) for item in methods if inspect.isfunction(item)]
    steps = (step for code in codes for step in dis.get_instructions(code))
    return frozenset(str(step.argval) for step in steps if step.opname == "STORE_ATTR")


def _map(turn: Callable[[Any], Any], value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(turn, value))
    if kind in (dict, OrderedDict):
        return kind((name, turn(item)) for name, item in value.items())
    return value


def _arguments(module: nn.Module) -> tuple[Sequence[Any], Mapping[str, Any]]:
    kind = type(module)
    if kind is nn.Sequential:
        names = [*module._modules]
        is_plain = names == [*map(str, range(len(names)))]
        parts = OrderedDict(module._modules)
        return [*parts.values()] if is_plain else [parts], {}
    if kind is nn.ModuleList:
        return [[*module._modules.values()]], {}
    noted = arguments_of(module)
    if not layers.is_library_module(kind):
        return noted or find_arguments(module)
    if noted is not None and noted[0]:  # the arguments without names of a library's own class
        return noted
    given: dict[str, Any] = dict(noted[1]) if noted is not None else {}
    for name, parameter in inspect.signature(kind).parameters.items():
        value = given.pop(name, getattr(module, name, parameter.default))
        is_array = name in module._parameters and not isinstance(value, bool)
        value = value is not None if is_array else value
        is_ignored = name in layers.IGNORED and name != "track_running_stats"
        if not is_ignored and value != parameter.default:
            given[name] = value
    return (), given
