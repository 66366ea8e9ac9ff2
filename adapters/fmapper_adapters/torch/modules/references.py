"""References to a module other than as a child: bound methods, closures, weak references."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import WrappedHook

NewOf = Callable[[Any], Any]
_TIED = (torch.nn.Module, torch.Tensor, torch.Generator)
_REFERRING = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    weakref.ReferenceType,
    WrappedHook,
)


def refers(value: Any) -> bool:
    """Returns whether a value may refer to a module."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ is not None
    return isinstance(value, (*_REFERRING, torch.Generator))


def rebind(value: Any, new_of: NewOf) -> Any:
    """Redirects a value's references to old modules to the new ones.

    Args:
        value: Anything; it is not changed.
        new_of: Returns the new object for an old one, or the object itself if it was not in the
            tree.

    Returns:
        The new value, or the value itself if none of its references changed.
    """
    if not _is_concerned(value, new_of, {}):
        return value
    return _renew(value, new_of, {})


def _is_concerned(value: Any, new_of: NewOf, seen: dict[int, Any]) -> bool:
    if isinstance(value, _TIED):
        return new_of(value) is not value
    if not isinstance(value, _REFERRING) or id(value) in seen:
        return False
    seen[id(value)] = value
    return any(_is_concerned(part, new_of, seen) for part in _parts(value))


def _parts(value: Any) -> list[Any]:
    """Returns the objects that a value refers to."""
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, WrappedHook):
        return [value.hook, value.module() if value.with_module else None]
    if isinstance(value, weakref.ReferenceType):
        return [value()]
    parts = list(vars(value).values())
    for cell in value.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return parts


def _renew(value: Any, new_of: NewOf, made: dict[int, Any]) -> Any:
    """Redirects an object within a value that refers to old modules."""
    if isinstance(value, _TIED):
        return new_of(value)
    if id(value) in made:
        return made[id(value)]
    if not _is_concerned(value, new_of, {}):
        return value
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, new_of(value.__self__))
    if isinstance(value, functools.partial):
        args = [_renew(x, new_of, made) for x in value.args]
        keywords = {name: _renew(x, new_of, made) for name, x in value.keywords.items()}
        return type(value)(_renew(value.func, new_of, made), *args, **keywords)
    if isinstance(value, WrappedHook):
        owner = new_of(value.module()) if value.with_module else None
        return WrappedHook(_renew(value.hook, new_of, made), owner)
    if isinstance(value, weakref.ReferenceType):
        return weakref.ref(new_of(value()))
    return _function(value, new_of, made)


def _function(old: types.FunctionType, new_of: NewOf, made: dict[int, Any]) -> Any:
    """Rebuilds a function with a closure over the new modules; other cells are shared."""
    cells = [
        cell if not _holds_old(cell, new_of) else types.CellType() for cell in old.__closure__ or ()
    ]
    new = types.FunctionType(
        old.__code__, old.__globals__, old.__name__, old.__defaults__, tuple(cells)
    )
    made[id(old)] = new
    for at, cell in enumerate(old.__closure__ or ()):
        if cells[at] is not cell:
            cells[at].cell_contents = _renew(cell.cell_contents, new_of, made)
    new.__kwdefaults__ = old.__kwdefaults__
    functools.update_wrapper(new, old)
    del new.__dict__["__wrapped__"]  # unless the old function has it
    new.__dict__.update((name, _renew(x, new_of, made)) for name, x in vars(old).items())
    return new


def _holds_old(cell: Any, new_of: NewOf) -> bool:
    try:
        return _is_concerned(cell.cell_contents, new_of, {})
    except ValueError:  # not assigned yet
        return False


def recompile(call: Any, module: Any) -> Any:
    """Returns the compiled call for a new module, compiled at its first run."""
    context = next(
        (
            cell.cell_contents
            for cell in getattr(call, "__closure__", None) or ()
            if _private.is_dynamo_context(cell.cell_contents)
        ),
        None,
    )
    return (
        torch.compile(_private.get_call(module))
        if context is None
        else context(_private.get_call(module))
    )
