"""Classes in JAX's pytree registry as nodes, and functors as pytrees of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import tree_util

from fmapper import Constant, NodeType, PyTreeRules, Static, is_dynamic, put_together, take_apart


def registered_type(cls: type) -> NodeType | None:
    """The node type of a class that is in JAX's registry: Equinox, flax.struct, chex ..."""
    if not tree_util.is_tree_node(cls) or _is_namedtuple(cls):
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

    def flatten_with_keys(node: Any) -> tuple[list[Any], Static | Constant]:
        values, static = take_apart(node, _RULES)
        keys = map(tree_util.GetAttrKey, static.dynamic)
        return list(zip(keys, values, strict=True)), static

    tree_util.register_pytree_with_keys(
        cls,
        flatten_with_keys,
        lambda static, children: put_together(static, children, _RULES),
        lambda node: take_apart(node, _RULES),
    )


def _is_dynamic(child: Any) -> bool:
    """Arrays, nodes and containers, and what stands for an array or becomes one in JAX."""
    return (
        isinstance(child, jax.ShapeDtypeStruct)
        or is_dynamic(child)
        or any("__jax_array__" in base.__dict__ for base in type(child).__mro__)
    )


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and any("_fields" in base.__dict__ for base in cls.__mro__)


def _opens(cls: type) -> bool:
    return tree_util.is_tree_node(cls) or _is_namedtuple(cls)


_RULES = PyTreeRules(_is_dynamic, _opens)
