"""One node at a time: its children, and a new one with other children."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fmapper.errors import StructureMismatchError
from fmapper.tracebacks import short_traceback
from fmapper.tree.nodes import LEAVES, kind_of, node_type_of, sync

T = TypeVar("T")


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
    """Returns whether a walk passes `x` to `f`; None and `()` are nodes without children.

    Examples:
        >>> import fmapper
        >>> [fmapper.is_leaf(x) for x in (1, "a", [], None)]
        [True, True, False, False]
    """
    sync()
    return kind_of(type(x)) in LEAVES
