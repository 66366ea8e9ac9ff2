"""How `torch.nn.Module` is taken apart, and functors as pytrees of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fmapper import (
    NodeType,
    RebuildError,
    Static,
    holds_arrays,
    is_dynamic,
    put_together,
    take_apart,
)
from fmapper_adapters.torch._host import as_parameter

Module = torch.nn.Module

_INTERNAL = frozenset(vars(Module()))
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(
    (name, type(value))
    for name, value in vars(Module()).items()
    if isinstance(value, dict | set) and name not in _REGISTRIES
)
_SEQUENCES = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ParameterList)
_SETTINGS = frozenset({int, float, str, bool, type(None)})
_new: Callable[[type], Any] = object.__new__
_set = object.__setattr__


def node_type(cls: type) -> NodeType | None:
    """The node type of a module class; None for every other class."""
    if not issubclass(cls, Module):
        return None
    numbered = issubclass(cls, _SEQUENCES)
    settled = _Settled()

    def items(module: Any) -> list[tuple[Any, Any]]:
        state = module.__dict__
        found = [*state["_parameters"].items()]
        if state["_buffers"]:
            found += state["_buffers"].items()
        if state["_modules"]:
            found += state["_modules"].items()
        if numbered:
            found = [(_number(name), child) for name, child in found]
        if len(state) > len(_INTERNAL):
            found += settled.extra(state)
        return found

    def open(module: Any, keep: Callable[[Any], None]) -> Any:
        found = items(module)
        keep(found)
        state = module.__dict__.copy()
        _own_hooks(state)
        new: Any = _new(cls)
        _set(new, "__dict__", state)
        return new, iter(found), {}, partial(_fill, module, new, state, numbered)

    return NodeType.opening(open, items, carried=_carried)


def _carried(module: Any) -> list[tuple[str, Any]]:
    """The attributes of a module that are neither children nor settings nor torch's own."""
    state = module.__dict__
    children = {name for name, _ in _extra(state)}
    return [
        (name, value)
        for name, value in state.items()
        if name not in _INTERNAL and name not in children and type(value) not in _SETTINGS
    ]


def _write_own_hooks() -> Callable[[dict[str, Any]], None]:
    """A function that gives a copied module state hook tables of its own, written out for speed."""
    lines = "".join(
        f"    state[{name!r}] = state[{name!r}].copy() if state[{name!r}] else {kind.__name__}()\n"
        for name, kind in _HOOKS
    )
    scope: dict[str, Any] = {kind.__name__: kind for _, kind in _HOOKS}
    exec(f"def own_hooks(state):\n{lines}", scope)
    written: Callable[[dict[str, Any]], None] = scope["own_hooks"]
    return written


_own_hooks = _write_own_hooks()


def _extra(state: dict[str, Any]) -> list[tuple[str, Any]]:
    """The attributes of a module that are arrays or hold some."""
    return [
        (name, value)
        for name, value in state.items()
        if type(value) not in _SETTINGS and name not in _INTERNAL and _is_child(value)
    ]


class _Settled:
    """`_extra` for one class, quick where all attributes are plain settings, as the last time."""

    def __init__(self) -> None:
        self.last: tuple[int, Callable[[dict[str, Any]], tuple[Any, ...]]] = (-1, tuple)

    def extra(self, state: dict[str, Any]) -> list[tuple[str, Any]]:
        """The attributes of a module that are arrays or hold some."""
        count, values = self.last
        if len(state) == count:
            try:
                if _SETTINGS.issuperset(map(type, values(state))):
                    return []
            except KeyError:  # as many attributes, but others
                pass
        names = [name for name in state if name not in _INTERNAL]
        # One name more, so that itemgetter gives a tuple in any case.
        self.last = len(state), itemgetter("training", *names)
        return _extra(state)


def _number(name: str) -> int | str:
    return int(name) if name.isdecimal() and str(int(name)) == name else name


def _is_child(value: Any) -> bool:
    """Whether an attribute is an array or a container of some; tuples of sizes are settings."""
    if isinstance(value, torch.Tensor):
        return True
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple) and any(isinstance(p, Module) for p in parts):
        return True
    if isinstance(value, tuple | list) and all(type(item) in _SETTINGS for item in value):
        return False
    return is_dynamic(value) and holds_arrays(value)


def _fill(
    old: Any, module: Any, state: dict[str, Any], numbered: bool, slots: dict[Any, Any]
) -> Any:
    """Distributes the new children over a module that was opened."""
    known = old.__dict__
    parameters, buffers, modules = (known[registry] for registry in _REGISTRIES)
    if numbered:
        slots = {str(key): child for key, child in slots.items()}
    new_parameters: dict[str, Any] = {}
    new_buffers: dict[str, Any] = {}
    new_modules: dict[str, Any] = {}
    if len(slots) == len(parameters):  # nothing else; the order is that of the module
        new_parameters = slots
    elif len(slots) == len(modules):
        new_modules = slots
    else:
        new_parameters = {name: slots.pop(name) for name in parameters}
        new_buffers = {name: slots.pop(name) for name in buffers}
        new_modules = {name: slots.pop(name) for name in modules}
        state.update(slots)
    for name, new in new_parameters.items():
        if new is not parameters[name]:
            new_parameters[name] = _tensor(old, name, parameters[name], new)
    for name, new in new_buffers.items():
        if new is not buffers[name]:
            new_buffers[name] = _tensor(old, name, buffers[name], new)
    for name, new in new_modules.items():
        if new is not None and not isinstance(new, Module):
            raise _unfit(old, name, new, "a module")
    state["_parameters"] = new_parameters
    state["_buffers"] = new_buffers
    state["_modules"] = new_modules
    return module


def _tensor(module: Any, name: str, old: Any, new: Any) -> Any:
    """What takes the place of a parameter or buffer; a tied parameter is wrapped once."""
    if new is old or new is None:
        return new
    if not isinstance(new, torch.Tensor):
        raise _unfit(module, name, new, "a tensor")
    if not isinstance(old, torch.nn.Parameter) or isinstance(new, torch.nn.Parameter):
        return new
    if torch._C._functorch.is_functorch_wrapped_tensor(new):
        return new  # inside torch.func a parameter would cut the gradient off
    of, by = _wrapped.get(id(new), (None, None))
    wrapped = by() if by is not None and of is not None and of() is old else None
    if wrapped is None:
        wrapped = as_parameter(new, old)
        i = id(new)
        _wrapped[i] = (weakref.ref(old), weakref.ref(wrapped))
        weakref.finalize(new, _wrapped.pop, i, None)
    return wrapped


# Which parameter a tensor was wrapped into, and in whose place: tied parameters stay one.
_wrapped: dict[int, tuple[Any, Any]] = {}


def _unfit(module: Any, name: str, new: Any, wanted: str) -> RebuildError:
    error = RebuildError(
        f"{type(module).__name__}.{name} must be {wanted}, not "
        f"{type(new).__module__}.{type(new).__name__}: a torch module holds torch tensors "
        "only. Take its arrays with fmapper.state(module), or turn the whole module into a program "
        "of the other framework with fmapper.convert(module, ...)."
    )
    error.placed = False
    return error


def registered_type(cls: type) -> NodeType | None:
    """The node type of a class that is in `torch.utils._pytree`."""
    entry = pytree.SUPPORTED_NODES.get(cls)
    if entry is None or cls is torch.Size:  # torch would make a plain tuple of it
        return None

    def take(node: Any) -> tuple[list[Any], list[Any], Any]:
        if entry.flatten_with_keys_fn is None:
            values, context = entry.flatten_fn(node)
            return list(range(len(values))), values, context
        pairs, context = entry.flatten_with_keys_fn(node)
        return [_key(key) for key, _ in pairs], [value for _, value in pairs], context

    def children(node: Any) -> dict[Any, Any]:
        keys, values, _ = take(node)
        return dict(zip(keys, values, strict=True))

    def rebuild(node: Any, new_children: Mapping[Any, Any]) -> Any:
        keys, _, context = take(node)
        return entry.unflatten_fn([new_children[key] for key in keys], context)

    return NodeType(children, rebuild)


def _key(key: Any) -> Any:
    if isinstance(key, pytree.MappingKey):
        return key.key
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    return key.name if isinstance(key, pytree.GetAttrKey) else key


def register_functor(cls: type) -> None:
    """Enters a functor class into `torch.utils._pytree`, unless it is there."""
    if cls in pytree.SUPPORTED_NODES:
        return

    def flatten_with_keys(node: Any) -> tuple[list[Any], Static]:
        values, static = take_apart(node, _is_dynamic)
        keys = map(pytree.GetAttrKey, static.dynamic)
        return list(zip(keys, values, strict=True)), static

    pytree.register_pytree_node(
        cls,
        lambda node: take_apart(node, _is_dynamic),
        lambda children, static: put_together(static, children, _is_dynamic),
        flatten_with_keys_fn=flatten_with_keys,
    )


def _is_dynamic(child: Any) -> bool:
    """As for JAX, but None is static: it is a leaf to torch, and no tensor."""
    return child is not None and is_dynamic(child)
