"""Pairs the parts of two structures by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmapper.backends.discovery import adapter_of
from fmapper.tree.nodes import NodeType, kind_of


def match(a: Any, b: Any) -> list[tuple[Any, Any, Any]] | str | None:
    """Pairs the parts of two structures, which may be of different classes.

    The order of names does not matter, and a part that is None counts as missing. A sequence is
    matched with the parts of the other structure in order.

    Returns:
        The key and both parts of each pair; a description of how the structures differ; or None if
        one of them has no parts.
    """
    ours, theirs = parts_of(a), parts_of(b)
    if ours is None or theirs is None:
        return None
    is_sequence = [_is_sequence(a, ours), _is_sequence(b, theirs)]
    if any(is_sequence):
        if len(ours) != len(theirs):
            return f"{len(ours)} and {len(theirs)} parts"
        keys = theirs if is_sequence[0] else ours
        return list(zip(keys, ours.values(), theirs.values(), strict=True))
    ours, theirs = ours | _others(a, ours, theirs), theirs | _others(b, theirs, ours)
    ours, theirs = ({k: x for k, x in parts.items() if x is not None} for parts in (ours, theirs))
    if ours.keys() != theirs.keys():
        return f"the keys {list(ours)} and {list(theirs)}"
    return [(key, value, theirs[key]) for key, value in ours.items()]


def parts_of(x: Any) -> dict[Any, Any] | None:
    """Returns the parts of a structure by key; None for a leaf.

    The parts of an object are its children or attributes that hold arrays. One that has no node
    type and no arrays is a leaf.
    """
    members = _members(x)
    if members is None or isinstance(x, Mapping | list | tuple):
        return members
    parts = {key: y for key, y in members.items() if isinstance(key, int) or _holds_arrays(y)}
    return parts if parts or isinstance(kind_of(type(x)), NodeType) else None


def _members(x: Any) -> dict[Any, Any] | None:
    """Returns the items, children or attributes of a structure by key; None for a leaf."""
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        names = getattr(x, "_names", x._fields)  # a record has some if its fields were renamed
        return dict(zip(names, x, strict=True))
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    kind = kind_of(type(x))
    if isinstance(kind, NodeType):
        return kind.children(x)
    if hasattr(x, "__dict__") and not callable(x):
        return dict(vars(x))
    return None


def _holds_arrays(x: Any) -> bool:
    """Returns whether a structure, which may be cyclic, holds an array at any depth."""
    seen = set[int]()
    todo = [x]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if adapter_of(part) is not None:
            return True
        todo += (_members(part) or {}).values()
    return False


def path_of(path: str, key: Any) -> str:
    """Returns the path of a part."""
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"


def _is_sequence(x: Any, parts: Mapping[Any, Any]) -> bool:
    return not isinstance(x, Mapping) and all(isinstance(key, int) for key in parts)


def _others(x: Any, parts: Mapping[Any, Any], other: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the attributes without arrays that the other structure has, too."""
    if isinstance(x, Mapping | tuple):
        return {}
    attributes = getattr(x, "__dict__", {})
    return {key: attributes[key] for key in other if key in attributes and key not in parts}
