"""Translates the structure of inputs and outputs from JAX's pytrees to plain data."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any

import jax
from jax import tree_util

from fmapper.programs import TreeSpec
from fmapper_adapters.jax import tree as _nodes

_LEAF = TreeSpec("leaf")


def tree_spec(tree: Any) -> TreeSpec:
    """Returns the plain form of a `PyTreeDef`; registered classes become records with fields."""
    if tree_util.treedef_is_leaf(tree) and tree.num_leaves:  # an empty tuple is not a leaf
        return _LEAF
    children = tuple(tree_spec(child) for child in tree.children())
    cls, data = tree.node_data()
    if cls in (tuple, list):
        return TreeSpec(cls.__name__, children)
    if cls in (dict, OrderedDict, defaultdict):
        keys = data[1] if cls is defaultdict else data
        return TreeSpec("dict", children, tuple(keys))
    names = getattr(cls, "_fields", None)
    names = _names(tree) if names is None else names
    if all(isinstance(key, str) for key in names) and _is_mapping(cls):
        return TreeSpec("dict", children, tuple(names))
    fields = tuple(map(str, names))
    return TreeSpec("record", children, fields, cls.__name__, fixed=_other_fields(tree, fields))


def _other_fields(tree: Any, fields: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """Returns the fields of a dataclass that are not children, with their values."""
    cls, _ = tree.node_data()
    if not dataclasses.is_dataclass(cls):
        return ()
    node = jax.tree.unflatten(tree, [None] * tree.num_leaves)
    others = (field.name for field in dataclasses.fields(cls) if field.name not in fields)
    held = {name: getattr(node, name) for name in others if hasattr(node, name)}
    return TreeSpec.plain_fields(held)


def _is_mapping(cls: type) -> bool:
    return hasattr(cls, "keys") and hasattr(cls, "__getitem__")


def _names(tree: Any) -> tuple[Any, ...]:
    """Returns the names of the children of a node of a registered class."""
    node = jax.tree.unflatten(tree, [None] * tree.num_leaves)
    return tuple(_key(key, i) for i, (key, _) in enumerate(_nodes.keyed_children(node)))


def _key(key: Any, i: int) -> Any:
    for name in ("name", "key"):
        if isinstance(getattr(key, name, None), str):
            return getattr(key, name)
    return f"field{i}"
