"""The adapter for optree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import optree

from fmapper.backends import Constant, Nodes, NodeType, Static, flatten, unflatten

NAMESPACE = "fmapper"


class OptreeAdapter(Nodes):
    """The adapter for optree: functors as its nodes in the namespace `fmapper`, and vice versa."""

    name: ClassVar[str] = "optree"

    def register_functor(self, cls: type) -> None:
        """Registers a functor class in the namespace; all children but static ones are dynamic."""
        if optree.register_pytree_node.get(cls, namespace=NAMESPACE) is None:
            optree.register_pytree_node(
                cls,
                _flatten,
                cast(Any, lambda static, children: unflatten(static, children, None)),
                path_entry_type=optree.GetAttrEntry,
                namespace=NAMESPACE,
            )

    def registered_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class in optree's registry."""
        # queries the whole registry: for one class optree reads `_fields`, and a metaclass may
        # raise
        get: Any = optree.register_pytree_node.get
        registered = get(namespace=NAMESPACE)
        entry = registered.get(cls)
        if entry is None or entry.kind is not optree.PyTreeKind.CUSTOM:
            return None
        return NodeType(_children, _rebuild, static=_metadata)


def _flatten(node: Any) -> tuple[list[Any], Static | Constant, tuple[str, ...]]:
    children, static = flatten(node, None)
    return children, static, static.dynamic


def _one_level(node: Any) -> Any:
    return optree.tree_flatten_one_level(node, namespace=NAMESPACE)


def _children(node: Any) -> dict[Any, Any]:
    flat = _one_level(node)
    return dict(zip(flat.entries, flat.children, strict=True))


def _rebuild(node: Any, new_children: Mapping[Any, Any]) -> Any:
    flat = _one_level(node)
    return flat.unflatten_func(flat.metadata, [new_children[key] for key in flat.entries])


def _metadata(node: Any) -> Any:
    return _one_level(node).metadata
