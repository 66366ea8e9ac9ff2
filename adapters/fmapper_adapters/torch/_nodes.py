"""How `torch.nn.Module` is taken apart, and functors as pytrees of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
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
_OWN_STATE = len(_INTERNAL)
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
    extra = _extra_of_class()

    def items(module: Any) -> list[tuple[Any, Any]]:
        state = module.__dict__
        found = [*state["_parameters"].items()]
        if state["_buffers"]:
            found += state["_buffers"].items()
        if state["_modules"]:
            found += state["_modules"].items()
        if numbered:
            found = [(_number(name), child) for name, child in found]
        if len(state) > _OWN_STATE:
            found += extra(state)
        return found

    def open(module: Any, keep: Callable[[Any], None]) -> Any:
        known = module.__dict__
        state = known.copy()
        _own_hooks(state)
        new: Any = _new(cls)
        _set(new, "__dict__", state)
        parameters, modules = known["_parameters"], known["_modules"]
        if known["_buffers"] or (len(known) > _OWN_STATE and extra(known)):
            pass
        elif parameters and not modules and not numbered:  # commonest: a layer
            source = parameters.copy()
            keep(source)
            slots = state["_parameters"] = parameters.copy()
            return new, iter(source.items()), slots, partial(_check_tensors, module, source, new)
        elif modules and not parameters:  # ... and a block of layers
            source = modules.copy()
            keep(source)
            finish = partial(_fill_modules, module, source, new, state)
            keys = _numbers(tuple(source)) if numbered else source
            return new, zip(keys, source.values(), strict=True), {}, finish
        found = items(module)
        keep(found)
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
    used = " or ".join(f"state[{name!r}]" for name, _ in _HOOKS)
    copies = "".join(f"        state[{name!r}] = state[{name!r}].copy()\n" for name, _ in _HOOKS)
    empty = "".join(f"        state[{name!r}] = {kind.__name__}()\n" for name, kind in _HOOKS)
    kinds = {kind.__name__: kind for _, kind in _HOOKS}
    parameters = ", ".join(f"{name}={name}" for name in kinds)
    scope: dict[str, Any] = dict(kinds)
    exec(f"def own_hooks(state, {parameters}):\n    if {used}:\n{copies}    else:\n{empty}", scope)
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


def _extra_of_class() -> Callable[[dict[str, Any]], list[tuple[str, Any]]]:
    """`_extra` for one class, quick where all attributes are plain settings, as the last time."""
    last: tuple[int, Callable[[dict[str, Any]], tuple[Any, ...]]] = (-1, tuple)
    only_settings = _SETTINGS.issuperset

    def extra(state: dict[str, Any]) -> list[tuple[str, Any]]:
        nonlocal last
        count, values = last
        if len(state) == count:
            try:
                if only_settings(map(type, values(state))):
                    return []
            except KeyError:  # as many attributes, but others
                pass
        names = [name for name in state if name not in _INTERNAL]
        # One name more, so that itemgetter gives a tuple in any case.
        last = len(state), itemgetter("training", *names)
        return _extra(state)

    return extra


def _number(name: str) -> int | str:
    return int(name) if name.isdecimal() and str(int(name)) == name else name


@lru_cache(1024)
def _numbers(names: tuple[str, ...]) -> tuple[int | str, ...]:
    return tuple(map(_number, names))


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
    new_parameters = {name: slots.pop(name) for name in parameters}
    new_buffers = {name: slots.pop(name) for name in buffers}
    new_modules = {name: slots.pop(name) for name in modules}
    state.update(slots)
    _check_tensors(old, parameters, module, new_parameters)
    _check_tensors(old, buffers, module, new_buffers)
    _check_modules(old, new_modules)
    state["_parameters"] = new_parameters
    state["_buffers"] = new_buffers
    state["_modules"] = new_modules
    return module


def _check_tensors(old: Any, known: dict[str, Any], module: Any, slots: dict[str, Any]) -> Any:
    """Makes parameters of what takes the place of parameters."""
    for name, new in slots.items():
        if new is not known[name]:
            slots[name] = _tensor(old, name, known[name], new)
    return module


def _fill_modules(
    old: Any, known: dict[str, Any], module: Any, state: dict[str, Any], slots: dict[Any, Any]
) -> Any:
    """Gives a module that holds modules only its new ones."""
    modules = state["_modules"] = dict(zip(known, slots.values(), strict=True))
    _check_modules(old, modules)
    return module


def _check_modules(old: Any, modules: dict[str, Any]) -> None:
    for name, new in modules.items():
        if not isinstance(new, Module) and new is not None:
            raise _unfit(old, name, new, "a module")


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
