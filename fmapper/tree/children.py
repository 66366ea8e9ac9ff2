"""One node at a time: its children, a new one with other children, and the walks made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fmapper.errors import StructureMismatchError
from fmapper.tracebacks import short_traceback
from fmapper.tree.keypath import KeyPath
from fmapper.tree.no_gradient import no_gradient
from fmapper.tree.node_type import CHILDLESS, LEAVES, NodeType
from fmapper.tree.nodes import kind_of, node_type_of, sync

T = TypeVar("T")
_EMPTY = ()


def children(node: Any) -> dict[Any, Any]:
    """Returns the children of a node by key, in order; empty for a leaf.

    Examples:
        >>> import fmapper
        >>> fmapper.children([5, 6])
        {0: 5, 1: 6}
    """
    sync()
    node_type = node_type_of(node)
    return {} if node_type is None else node_type.children(node)


@short_traceback
def rebuild(node: T, new_children: Mapping[Any, Any] | Sequence[Any]) -> T:
    """Returns a new node like `node` with other children; `node` is not changed.

    Args:
        node: A node; a leaf comes back as it is.
        new_children: A mapping with the keys of `children(node)`, or a sequence in their order.

    Raises:
        StructureMismatchError: The keys, or the number of children, differ.

    Examples:
        >>> import fmapper
        >>> fmapper.rebuild({"w": 1, "b": 2}, {"w": 10, "b": 20})
        {'w': 10, 'b': 20}
    """
    sync()
    node_type = node_type_of(node)
    have = {} if node_type is None else node_type.children(node)
    if isinstance(new_children, Mapping):
        given = dict(new_children)
    elif len(new_children) == len(have):
        given = dict(zip(have, new_children, strict=True))
    else:
        raise StructureMismatchError(
            f"rebuild: {type(node).__name__} has {len(have)} children, "
            f"but {len(new_children)} were passed."
        )
    if given.keys() != have.keys():
        raise StructureMismatchError(
            f"rebuild: {type(node).__name__} has the children "
            f"{', '.join(map(repr, have)) or 'none'}, but got "
            f"{', '.join(map(repr, given)) or 'none'}."
        )
    return node if node_type is None else node_type.rebuild(node, given)


def is_leaf(x: Any) -> bool:
    """Returns whether a walk gives `x` to `f`: it is not a node. None and `()` are childless nodes.

    Examples:
        >>> import fmapper
        >>> [fmapper.is_leaf(x) for x in (1, "a", [], None)]
        [True, True, False, False]
    """
    sync()
    return kind_of(type(x)) in LEAVES


def match_children(node: Any, have: Mapping[Any, Any], other: Any) -> dict[Any, Any]:
    """Returns the children of `other`, which must have the keys that `node` has.

    Raises:
        StructureMismatchError: It has others; the walk that sees the error adds the path.
    """
    if node is no_gradient:  # whatever the others have there
        return {}
    kind = kind_of(type(other))
    if isinstance(kind, NodeType):
        found = kind.children(other)
        if found.keys() == have.keys():
            return found
        problem = _differing_keys(node, have, other, found)
    elif kind is CHILDLESS and not have:
        return {}
    else:
        what = "None" if kind is CHILDLESS else f"a leaf of type {type(other).__name__}"
        name = type(node).__name__
        problem = f"the first tree has {name} with {_count(have)} here, a later one has {what}."
    error = StructureMismatchError(problem)
    error.placed = False
    raise error


def _differing_keys(
    node: Any, have: Mapping[Any, Any], other: Any, found: Mapping[Any, Any]
) -> str:
    mine, theirs = type(node).__name__, type(other).__name__
    if all(list(keys) == list(range(len(keys))) for keys in (have, found)):
        return f"{mine} has {_count(have)}, {theirs} in a later tree has {_count(found)}."
    missing = [repr(key) for key in have if key not in found]
    extra = [repr(key) for key in found if key not in have]
    parts = [f"lacks {', '.join(missing)}"] * bool(missing)
    parts += [f"has {', '.join(extra)} besides"] * bool(extra)
    names = ", ".join(map(repr, have)) or "no children"
    return f"{mine} has {names}; {theirs} in a later tree {' and '.join(parts)}."


def _count(keys: Mapping[Any, Any]) -> str:
    return f"{len(keys)} {'child' if len(keys) == 1 else 'children'}"


# --- walks for `walk=` --------------------------------------------------------------------------


def default_walk(recurse: Callable[..., Any], node: Any, *rest: Any) -> Any:
    """Maps the children of a node and rebuilds it, as `fmap` does without `walk=`."""
    node, node_type, _, mapped = _recurse_into(recurse, node, rest)
    return node if node_type is None else node_type.rebuild(node, mapped)


def structural_walk(recurse: Callable[..., Any], node: Any, *rest: Any) -> Any:
    """Maps the children into a plain dict, list or tuple, as `fmapstructure` does."""
    _, node_type, _, mapped = _recurse_into(recurse, node, rest)
    plain = dict if node_type is None else node_type.plain
    return mapped if plain is dict else plain(mapped.values())


def collecting_walk(recurse: Callable[..., Any], node: Any, *rest: Any) -> list[Any]:
    """Collects the results of `f` in one flat list; use it with `cache=None`.

    Examples:
        >>> import fmapper
        >>> fmapper.fmap(str, {"a": [1, 2], "b": 3}, walk=fmapper.collecting_walk, cache=None)
        ['1', '2', '3']
    """
    _, _, have, results = _recurse_into(recurse, node, rest)
    out = _Collected()
    for key, mapped in results.items():
        if isinstance(mapped, _Collected):
            out.extend(mapped)
        elif not (mapped is have[key] and (mapped is None or mapped is _EMPTY)):
            out.append(mapped)
    return out


class _Collected(list[Any]):
    """The list that a collecting walk makes, which is never what `f` returned."""


def _recurse_into(
    recurse: Callable[..., Any], node: Any, rest: tuple[Any, ...]
) -> tuple[Any, NodeType | None, dict[Any, Any], dict[Any, Any]]:
    """Returns a node (after its path, if any), its type, and its children, old and new."""
    path = node if isinstance(node, KeyPath) else None
    if path is not None:
        node, *rest = rest  # type: ignore[assignment]
    sync()
    node_type = node_type_of(node)
    have = {} if node_type is None else node_type.children(node)
    matched = [match_children(node, have, other) for other in rest]
    new = {}
    for key, child in have.items():
        place = () if path is None else (KeyPath(path, key),)
        new[key] = recurse(*place, child, *(found[key] for found in matched))
    return node, node_type, have, new
