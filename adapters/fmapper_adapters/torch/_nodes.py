"""How `torch.nn.Module` is taken apart, and functors as pytrees of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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

_STATE = frozenset(vars(Module()))
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_COPIED = tuple(
    name
    for name, value in vars(Module()).items()
    if isinstance(value, dict | set) and name not in _REGISTRIES
)
_SEQUENCES = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ParameterList)
_PARAMETER = "_fmapper_parameter"


def node_type(cls: type) -> NodeType | None:
    """The node type of a module class; None for every other class."""
    if not issubclass(cls, Module):
        return None
    numbered = issubclass(cls, _SEQUENCES)

    def items(module: Any) -> Iterable[tuple[Any, Any]]:
        return _items(module, numbered)

    def open(module: Any, keep: Callable[[Any], None]) -> Any:
        new = object.__new__(cls)
        state = new.__dict__
        state.update(module.__dict__)
        for name in _COPIED:
            value = state[name]
            state[name] = value.copy() if value else type(value)()
        found = list(_items(module, numbered))
        keep(found)
        slots: dict[Any, Any] = {}

        def finish(filled: dict[Any, Any]) -> Any:
            _fill(module, state, filled, numbered)
            return new

        return new, iter(found), slots, finish

    return NodeType.opening(open, items)


def _items(module: Any, numbered: bool) -> Iterator[tuple[Any, Any]]:
    state = module.__dict__
    for registry in _REGISTRIES:
        for name, child in state[registry].items():
            yield (int(name) if numbered and name.isdecimal() else name), child
    if len(state) > len(_STATE):
        for name, value in state.items():
            if name not in _STATE and not isinstance(value, _PLAIN) and _holds_arrays(value):
                yield name, value


_PLAIN = (int, float, str, bool, type(None))


def _holds_arrays(value: Any) -> bool:
    """Whether an attribute is an array or a container of some; tuples of sizes are settings."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, tuple | list) and all(isinstance(item, _PLAIN) for item in value):
        return False
    return is_dynamic(value) and holds_arrays(value)


def _fill(old: Any, state: dict[str, Any], children: Mapping[Any, Any], numbered: bool) -> None:
    given = {str(key): child for key, child in children.items()} if numbered else children
    rest = dict(given)
    for registry in _REGISTRIES:
        known = old.__dict__[registry]
        state[registry] = filled = type(known)()
        for name, child in known.items():
            new = rest.pop(name)
            if registry != "_modules":
                new = _tensor(old, name, child, new)
            elif new is not None and not isinstance(new, Module):
                raise _unfit(old, name, new, "a module")
            filled[name] = new
    state.update(rest)


def _tensor(module: Any, name: str, old: Any, new: Any) -> Any:
    """What takes the place of a parameter or buffer; a tied parameter is wrapped once."""
    if new is old or new is None:
        return new
    if not isinstance(new, torch.Tensor):
        raise _unfit(module, name, new, "a tensor")
    if not isinstance(old, torch.nn.Parameter) or isinstance(new, torch.nn.Parameter):
        return new
    wrapped = new.__dict__.get(_PARAMETER)
    if wrapped is None:
        wrapped = as_parameter(new, old)
        new.__dict__[_PARAMETER] = wrapped
    return wrapped


def _unfit(module: Any, name: str, new: Any, wanted: str) -> RebuildError:
    error = RebuildError(
        f"{type(module).__qualname__}.{name} must be {wanted}, not "
        f"{type(new).__module__}.{type(new).__qualname__}: a torch module holds torch tensors only. "
        "Take its arrays with fmapper.state(module), or turn the whole module into a program of the "
        "other framework with fmapper.convert(module, ...)."
    )
    error.placed = False
    return error


def registered_type(cls: type) -> NodeType | None:
    """The node type of a class that is in `torch.utils._pytree`."""
    entry = pytree.SUPPORTED_NODES.get(cls)
    if entry is None:
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
