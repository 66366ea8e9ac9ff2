"""Classes in JAX's pytree registry as nodes, and functors as pytrees of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import tree_util

from fmapper import NodeType, Static, is_dynamic, put_together, take_apart


def registered_type(cls: type) -> NodeType | None:
    """The node type of a class that is in JAX's registry: Equinox, flax.struct, chex ..."""
    if not tree_util.is_tree_node(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return None

    def children(node: Any) -> dict[Any, Any]:
        pairs, _ = tree_util.flatten_one_level_with_keys(node)
        return {_key(key): child for key, child in pairs}

    def rebuild(node: Any, new_children: Mapping[Any, Any]) -> Any:
        treedef: Any = jax.tree.structure(node, is_leaf=lambda inner: inner is not node)
        return treedef.unflatten(list(new_children.values()))

    def static(node: Any) -> Any:
        return jax.tree.structure(node, is_leaf=lambda inner: inner is not node)

    return NodeType(children, rebuild, static=static)


def _key(key: Any) -> Any:
    for name in ("name", "key", "idx"):
        if hasattr(key, name):
            return getattr(key, name)
    return key


def register_functor(cls: type) -> None:
    """Enters a functor class into JAX's registry, unless it is there."""
    if tree_util.is_tree_node(cls):
        return

    def flatten_with_keys(node: Any) -> tuple[list[Any], Static]:
        values, static = take_apart(node, _is_dynamic)
        keys = map(tree_util.GetAttrKey, static.dynamic)
        return list(zip(keys, values, strict=True)), static

    tree_util.register_pytree_with_keys(
        cls,
        flatten_with_keys,
        lambda static, children: put_together(static, children, _is_dynamic),
        lambda node: take_apart(node, _is_dynamic),
    )


def _is_dynamic(child: Any) -> bool:
    """Arrays, nodes and containers, and the shapes that stand for arrays in `jax.eval_shape`."""
    return isinstance(child, jax.ShapeDtypeStruct) or is_dynamic(child)
