"""Classes in JAX's pytree registry as nodes, and functors as pytrees of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import tree_util

from fmapper import Constant, NodeType, PyTreeRules, Static, is_dynamic, put_together, take_apart


def is_tree_node(cls: type) -> bool:
    """Whether JAX's registry has a class."""
    known: Any = getattr(tree_util, "is_tree_node", None)
    if known is not None:
        return bool(known(cls))
    try:  # before JAX 0.10 only objects are told apart, by their types alone
        empty = next(base for base in cls.__mro__ if base.__flags__ & _HEAP_TYPE == 0)
        shell: Any = empty.__new__(cls)  # type: ignore[call-overload]
    except TypeError:
        return cls is type(None)
    return not tree_util.all_leaves([shell])


_HEAP_TYPE = 1 << 9


def keyed_children(node: Any) -> list[tuple[Any, Any]]:
    """The children of a node in JAX's registry, each with its key."""
    pairs, _ = tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    return [(path[0], child) for path, child in pairs]


def registered_type(cls: type) -> NodeType | None:
    """The node type of a class that is in JAX's registry: Equinox, flax.struct, chex ..."""
    if not is_tree_node(cls) or _is_namedtuple(cls):
        return None

    def children(node: Any) -> dict[Any, Any]:
        return {_key(key): child for key, child in keyed_children(node)}

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
    if is_tree_node(cls):
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
    return is_tree_node(cls) or _is_namedtuple(cls)


_RULES = PyTreeRules(_is_dynamic, _opens)
