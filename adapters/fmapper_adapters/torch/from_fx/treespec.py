"""Translates the structure of inputs and outputs from torch's pytree to plain data."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

from fmapper.programs import TreeSpec

_LEAF = TreeSpec("leaf")


def tree_spec(spec: Any) -> TreeSpec:
    """Returns the plain form of a `TreeSpec` of torch.

    Classes that were registered as nodes, such as `ModelOutput`s, caches and dataclasses, become
    records with the names of their fields.
    """
    if spec.is_leaf():
        return _LEAF
    children = tuple(tree_spec(spec.child(i)) for i in range(spec.num_children))
    if spec.type in (tuple, list):
        return TreeSpec(spec.type.__name__, children)
    if spec.type is deque:
        return TreeSpec("list", children)
    if spec.type in (dict, OrderedDict, defaultdict):
        keys = spec.context[1] if spec.type is defaultdict else spec.context
        return TreeSpec("dict", children, tuple(keys))
    fields, absent = _fields(spec)
    # For a named tuple the context is its class.
    cls = spec.context if spec.type is namedtuple else spec.type
    others = {key: value for key, value in _others(spec).items() if key not in fields}
    return TreeSpec("record", children, fields, cls.__name__, absent, TreeSpec.plain_fields(others))


def _fields(spec: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of children, and of fields without children."""
    named = getattr(spec.context, "_fields", None)
    for attribute in ("names", "dynamic"):  # contexts of recorded objects, and of functors
        if isinstance(getattr(spec.context, attribute, None), tuple):
            named = getattr(spec.context, attribute)
    if named is None:
        named = _names_in(spec.context, spec.num_children)
    if named is None:
        named = tuple(f"field{i}" for i in range(spec.num_children))
    all_of_them = getattr(spec.type, "__dataclass_fields__", {})
    return tuple(named), tuple(name for name in all_of_them if name not in named)


def _others(spec: Any) -> dict[str, Any]:
    """Returns the fields of a class that are not children, if its context has their values."""
    static = getattr(spec.context, "static", None)
    if isinstance(static, dict):
        return static
    names = getattr(spec.type, "__dataclass_fields__", {})
    if isinstance(spec.type, type) and issubclass(spec.type, OrderedDict):  # a `ModelOutput`
        return dict.fromkeys(names)
    if names and isinstance(spec.context, list) and len(spec.context) == 2:
        return dict.fromkeys(spec.context[1])  # torch's own dataclasses: those that were None
    return {}


def _names_in(context: Any, count: int) -> tuple[str, ...] | None:
    """Finds the list of field names in the context of a class."""
    if isinstance(context, dict):
        context = tuple(context.values())
    if not isinstance(context, list | tuple):
        return None
    if len(context) == count and all(isinstance(name, str) for name in context):
        return tuple(context)
    return next(filter(None, (_names_in(inner, count) for inner in context)), None)
