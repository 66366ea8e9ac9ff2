"""What refers to a module without being its child: bound methods, closures, weak references."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import _WrappedHook

NewOf = Callable[[Any], Any]
_TIED = (torch.nn.Module, torch.Tensor)


def refers(value: Any) -> bool:
    """Whether a value may be one that `rebound` changes."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ is not None
    return isinstance(value, types.MethodType | functools.partial | weakref.ref | _WrappedHook)


def rebound(value: Any, new_of: NewOf) -> Any:
    """A value that refers to the new module where it referred to the old one.

    Args:
        value: Anything; it is not changed.
        new_of: Gives what an object has become, and the object itself if it was not in the tree.

    Returns:
        The value itself if nothing that it refers to has become another object.
    """
    if isinstance(value, types.MethodType):
        owner = new_of(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if isinstance(value, functools.partial):
        func = rebound(value.func, new_of)
        args = [_argument(x, new_of) for x in value.args]
        keywords = {name: _argument(x, new_of) for name, x in value.keywords.items()}
        parts = [(func, value.func), *zip(args, value.args, strict=True)]
        parts += [(keywords[name], x) for name, x in value.keywords.items()]
        if all(new is old for new, old in parts):
            return value
        return type(value)(func, *args, **keywords)
    if isinstance(value, _WrappedHook):
        return _wrapped_hook(value, new_of)
    if isinstance(value, weakref.ReferenceType):
        target = value()
        new = new_of(target)
        # The reference holds a new module as little as it held the old one.
        return value if new is target or target is None else weakref.ref(new)
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _function(value, new_of)
    return value


def _argument(x: Any, new_of: NewOf) -> Any:
    return new_of(x) if isinstance(x, _TIED) else rebound(x, new_of)


def _function(old: types.FunctionType, new_of: NewOf) -> Any:
    """A function with a closure over the new modules; its other cells are shared with the old."""
    cells = []
    for cell in old.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            cells.append(cell)
            continue
        new = new_of(content) if isinstance(content, _TIED) else content
        cells.append(cell if new is content else types.CellType(new))
    if all(new is cell for new, cell in zip(cells, old.__closure__ or (), strict=True)):
        return old
    made = types.FunctionType(
        old.__code__, old.__globals__, old.__name__, old.__defaults__, tuple(cells)
    )
    made.__kwdefaults__ = old.__kwdefaults__
    return functools.update_wrapper(made, old)


def _wrapped_hook(old: Any, new_of: NewOf) -> Any:
    """A hook of `load_state_dict`, which torch ties to its module by a weak reference."""
    hook = rebound(old.hook, new_of)
    module = old.module() if old.with_module else None
    owner = new_of(module)
    if hook is old.hook and owner is module:
        return old
    return _WrappedHook(hook, owner)


def compiled(call: Any, module: Any) -> Any:
    """What `module.compile()` has left in an old module, for a new one: compiled when it runs."""
    context = next(
        (
            cell.cell_contents
            for cell in getattr(call, "__closure__", None) or ()
            if isinstance(cell.cell_contents, torch._dynamo.eval_frame._TorchDynamoContext)
        ),
        None,
    )
    return torch.compile(module._call_impl) if context is None else context(module._call_impl)
