"""Reaching into a tree by key path: get, has, set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

from fmapper.errors import PathError
from fmapper.tracebacks import short_traceback
from fmapper.tree.keypath import KeyPath, format_keys
from fmapper.tree.nodes import node_type_of, sync

T = TypeVar("T")


@short_traceback
def get_path(tree: Any, path: KeyPath | str | Iterable[Any]) -> Any:
    """Returns the node or leaf at a key path.

    Args:
        tree: Anything.
        path: A `KeyPath`, a list or tuple of keys, or a string in the printed form of a path, with
            or without the leading `model` that messages print.

    Raises:
        PathError: The path does not exist; the message lists the keys that do.

    Examples:
        >>> import fmapper
        >>> fmapper.get_path({"layers": [{"w": 1}, {"w": 2}]}, "layers[1].w")
        2
    """
    sync()
    return _steps(tree, as_path(path, tree))[-1]


def has_path(tree: Any, path: KeyPath | str | Iterable[Any]) -> bool:
    """Returns whether a key path leads to a node or leaf.

    Examples:
        >>> import fmapper
        >>> fmapper.has_path([{"w": 1}], "[0].w"), fmapper.has_path([{"w": 1}], "[0].b")
        (True, False)
    """
    sync()
    try:
        _steps(tree, as_path(path, tree))
    except PathError:
        return False
    return True


@short_traceback
def set_path(tree: T, path: KeyPath | str | Iterable[Any], value: Any) -> T:
    """Returns a new tree with `value` at a key path; it shares the rest with the unchanged `tree`.

    Only this path changes: an object that is tied to other places keeps its old value there.

    Raises:
        PathError: The path does not exist.

    Examples:
        >>> import fmapper
        >>> w = [1]
        >>> fmapper.set_path({"a": w, "b": w}, "a[0]", 2)
        {'a': [2], 'b': [1]}
    """
    sync()
    keys = as_path(path, tree)
    nodes = _steps(tree, keys)
    for node, key in zip(reversed(nodes[:-1]), reversed(keys.keys), strict=True):
        node_type = node_type_of(node)
        assert node_type is not None
        have = node_type.children(node)
        have[_own_key(have, key)] = value
        value = node_type.rebuild(node, have)
    return cast(T, value)


def as_path(path: KeyPath | str | Iterable[Any], tree: Any) -> KeyPath:
    """Parses a user's path: a KeyPath, a printed path, or a sequence of keys."""
    if isinstance(path, KeyPath):
        return path
    if not isinstance(path, str):
        return KeyPath(*path)
    parsed = KeyPath.parse(path)
    if parsed.keys[:1] == ("model",):  # errors print it so; kept if the tree has such a child
        node_type = node_type_of(tree)
        if node_type is None or "model" not in node_type.children(tree):
            return parsed[1:]
    return parsed


def _steps(tree: Any, path: KeyPath) -> list[Any]:
    """Returns the nodes along a path, from the root to its end."""
    nodes = [tree]
    for depth, key in enumerate(path.keys):
        node_type = node_type_of(nodes[-1])
        have = {} if node_type is None else node_type.children(nodes[-1])
        child_key = _own_key(have, key)
        if child_key not in have:
            what = type(nodes[-1]).__name__
            keys = ", ".join(map(repr, have)) if have else "no children"
            raise PathError(
                f"{format_keys(path.keys[:depth])}: there is no child {key!r}. "
                f"This {what} has {keys}."
            )
        nodes.append(have[child_key])
    return nodes


def _own_key(have: dict[Any, Any], key: Any) -> Any:
    """Returns the key as the node spells it: a negative index counts from the end of a sequence."""
    if (
        key not in have
        and isinstance(key, int)
        and key < 0
        and list(have) == list(range(len(have)))
    ):
        return len(have) + key
    return key
