"""Classes of torch's own pytree registry as nodes, and functors as pytrees of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fmapper.backends import (
    Constant,
    NodeType,
    PyTreeRules,
    Static,
    flatten,
    is_dynamic,
    unflatten,
)
from fmapper_adapters.torch._private import pytree


def registered_type(cls: type) -> NodeType | None:
    """Returns the node type of a class that is in `torch.utils._pytree`."""
    entry = pytree.SUPPORTED_NODES.get(cls)
    if entry is None or cls is torch.Size:  # torch would turn it into a plain tuple
        return None

    def take(node: Any) -> tuple[list[Any], list[Any], Any]:
        if entry.flatten_with_keys_fn is None:
            values, context = entry.flatten_fn(node)
            return list(range(len(values))), values, context
        pairs, _ = entry.flatten_with_keys_fn(node)
        # With keys, torch's own dataclasses return an incomplete context, which cannot rebuild
        # them.
        _, context = entry.flatten_fn(node)
        return [_key(key) for key, _ in pairs], [value for _, value in pairs], context

    def children(node: Any) -> dict[Any, Any]:
        keys, values, _ = take(node)
        return dict(zip(keys, values, strict=True))

    def rebuild(node: Any, new_children: Mapping[Any, Any]) -> Any:
        keys, _, context = take(node)
        return entry.unflatten_fn([new_children[key] for key in keys], context)

    return NodeType(children, rebuild, static=lambda node: take(node)[2])


def _key(key: Any) -> Any:
    if isinstance(key, pytree.MappingKey):
        return key.key
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    return key.name if isinstance(key, pytree.GetAttrKey) else key


def register_functor(cls: type) -> None:
    """Registers a functor class with `torch.utils._pytree`, unless it is registered already."""
    if cls in pytree.SUPPORTED_NODES:
        return

    def flatten_with_keys(node: Any) -> tuple[list[Any], Static | Constant]:
        values, static = flatten(node, _RULES)
        keys = map(pytree.GetAttrKey, static.dynamic)
        return list(zip(keys, values, strict=True)), static

    pytree.register_pytree_node(
        cls,
        lambda node: flatten(node, _RULES),
        lambda children, static: unflatten(static, children, _RULES),
        flatten_with_keys_fn=flatten_with_keys,
    )


def _is_dynamic(child: Any) -> bool:
    """Returns whether a value is dynamic; None is static, since torch counts it as a leaf."""
    return child is not None and is_dynamic(child)


def _opens(cls: type) -> bool:
    return cls in pytree.SUPPORTED_NODES or pytree.is_namedtuple_class(cls)


_RULES = PyTreeRules(_is_dynamic, _opens, pytree.tree_leaves, pytree.tree_flatten)
