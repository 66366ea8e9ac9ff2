"""Classes with tensors that torch's pytree does not know, such as key-value caches.

`torch.export` accepts and returns only what its pytree can flatten. While a module is recorded, any
class among its inputs and outputs is a node whose children are the attributes with tensors, and
integers next to them. Afterwards the registry is restored.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.from_fx.treespec import tree_spec

_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.nn.Module, str)
_COMPUTED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_VALUES = (*_COMPUTED, enum.Enum)
# Integers, and torch's placeholders for those that may vary.
_COUNTS = (int, getattr(torch.export.dynamic_shapes, "_IntWrapper", int))


@contextlib.contextmanager
def register(module: torch.nn.Module, inputs: Any) -> Iterator[None]:
    """Registers the classes of inputs and outputs as pytrees, within the block.

    Args:
        module: The module; a hook inspects its results during the recording.
        inputs: The example inputs.
    """
    added: list[type] = []

    def look(_: Any, __: Any, output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():  # the first attempt has registered it
            _register(output, added)

    hook = module.register_forward_hook(look)
    try:
        _register(inputs, added)
        yield
    finally:
        hook.remove()
        for cls in added:
            _private.deregister_node(cls)


def _register(tree: Any, added: list[type]) -> None:
    """Registers the foreign classes in a tree, outermost first."""
    todo = [tree]
    while todo:
        for leaf in pytree.tree_leaves(todo.pop()):
            if not _is_foreign(leaf):
                continue
            cls = type(leaf)
            if cls not in pytree.SUPPORTED_NODES:
                _enter(cls)
                added.append(cls)
            todo.append(leaf)


def _enter(cls: type) -> None:
    _private.register_node(
        cls,
        _flatten,
        lambda children, context: _unflatten(cls, children, context),
        flatten_with_keys_fn=_flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )


def fields_of(value: Any) -> dict[str, Any] | None:
    """Returns the fields of an object that hold tensors; None without such fields."""
    if _is_foreign(value):
        children, rest = _flatten(value)
        return dict(zip(rest.names, children, strict=True)) or None
    children, spec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    structure = tree_spec(spec)
    return dict(zip(structure.keys, children, strict=True)) if structure.kind == "record" else None


class Rest:
    """The static part of an object: the names of its children, and other attributes.

    Attributes:
        names: The names of the children.
        static: The other attributes.
    """

    def __init__(self, names: tuple[str, ...], static: dict[str, Any]) -> None:
        self.names = names
        self.static = static

    def __eq__(self, other: object) -> bool:
        """Compares by names: other attributes may not support `==`."""
        return isinstance(other, Rest) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)


def _flatten(node: Any) -> tuple[list[Any], Rest]:
    attributes = dict(vars(node))
    names = [name for name, value in attributes.items() if _holds_tensors(value)]
    if names:  # integers next to tensors become inputs, which are checked or vary
        names = [
            name for name, value in attributes.items() if name in names or type(value) in _COUNTS
        ]
        names = _longest_first(names)
    children = [attributes.pop(name) for name in names]
    return children, Rest(tuple(names), _own(attributes, {}))


def _longest_first(names: list[str]) -> list[str]:
    """Sorts names so that prefixes come after longer names.

    torch replaces them in this order in the code of its checks, without regard to word ends:
    `cumulative_length` before `cumulative_length_int` would leave invalid code.
    """
    ordered: list[str] = []
    for name in names:
        at = next(
            (i for i, earlier in enumerate(ordered) if name.startswith(earlier)), len(ordered)
        )
        ordered.insert(at, name)
    return ordered


def _flatten_with_keys(node: Any) -> tuple[list[Any], Rest]:
    children, rest = _flatten(node)
    return list(zip(map(pytree.GetAttrKey, rest.names), children, strict=True)), rest


def _unflatten(cls: type, children: Iterable[Any], rest: Rest) -> Any:
    new: Any = object.__new__(cls)
    vars(new).update(_own(rest.static, {}))
    vars(new).update(zip(rest.names, children, strict=True))
    return new


def _own(value: Any, copies: dict[int, Any]) -> Any:
    """Copies containers and objects, since a forward may fill empty caches.

    Args:
        value: An attribute without tensors, or its content.
        copies: The copies so far, by the identity of the original.
    """
    if id(value) in copies:
        return copies[id(value)]
    if type(value) in (list, dict):
        new = copies[id(value)] = copy.copy(value)
        new.clear()
        if isinstance(value, dict):
            new.update((key, _own(inner, copies)) for key, inner in value.items())
        else:
            new.extend(_own(inner, copies) for inner in value)
        return new
    if type(value) is tuple:
        return tuple(_own(inner, copies) for inner in value)
    if not _is_foreign(value):
        return value
    try:
        new = copies[id(value)] = copy.copy(value)
    except TypeError:  # a handle, which cannot be copied and has no tensors
        return value
    vars(new).update((name, _own(inner, copies)) for name, inner in vars(value).items())
    return new


def _is_foreign(leaf: Any) -> bool:
    """Returns whether an object has attributes and is not a value that torch accepts."""
    return hasattr(leaf, "__dict__") and not isinstance(leaf, (*_VALUES, *_OPAQUE))


def _holds_tensors(x: Any) -> bool:
    """Returns whether an object holds tensors, or varying sizes, at any depth."""
    seen: dict[int, Any] = {}
    todo = [x]
    while todo:
        value = todo.pop()
        if isinstance(value, _COMPUTED):
            return True
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list | tuple):
            todo.extend(value)
        elif hasattr(value, "__dict__"):
            todo.extend(vars(value).values())
    return False
