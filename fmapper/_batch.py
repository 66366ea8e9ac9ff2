"""Maps that want all leaves of a tree at once: movers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fmapper._errors import FmapperError
from fmapper._keypath import Link
from fmapper._nodes import ATOM, INTERNED, LEAF, NodeType, kind_of
from fmapper._visit import visit

Where = Callable[[Any], Link]


class LeafBatch(Protocol):
    """An `f` that wants all leaves at once; movers are of this kind."""

    def move_leaves(self, leaves: Sequence[Any], where: Where) -> Sequence[Any]:
        """The new leaves, in order.

        Args:
            leaves: Each distinct leaf once; what has no identity, such as numbers, is not there.
            where: `where(index)` is the first path to a leaf. It costs a walk.
        """
        ...

    def check_node(self, node: Any, node_type: NodeType, where: Where) -> None:
        """Called with every node before the leaves are moved; `where(node)` is its path."""
        ...


def moved_leaves(
    f: LeafBatch,
    tree: Any,
    is_leaf: Callable[[Any], bool] | None,
    once: bool,
    known: Mapping[Any, Any] | None,
) -> Callable[[Any], Any]:
    """Has all leaves of a tree moved at once; returns the map from each to what it has become.

    Args:
        f: Moves them.
        tree: Anything.
        is_leaf: Nodes for which it is true are leaves too.
        once: Whether a leaf that occurs at several places is moved once, or once for each.
        known: With `once`: a memo with what needs no moving.
    """

    def visited() -> list[tuple[Link, Any]]:
        return [
            (link, value)
            for link, value, kind in visit(tree, is_leaf=is_leaf, once=once, known=known)
            if kind is None and kind_of(type(value)) is not ATOM
        ]

    def where_node(node: Any) -> Link:
        walk = visit(tree, is_leaf=is_leaf, once=once, known=known)
        return next((link for link, value, _ in walk if value is node), None)

    def check(node: Any, node_type: NodeType) -> None:
        f.check_node(node, node_type, where_node)

    paths: list[tuple[Link, Any]] = []

    def where(index: int) -> Link:
        if not paths:
            paths.extend(visited())
        return paths[index][0]

    if once:
        leaves = _collected(tree, is_leaf, known, check)
        new = dict(zip(map(id, leaves), f.move_leaves(leaves, where), strict=True))

        def moved(leaf: Any) -> Any:
            try:
                return new[id(leaf)]
            except KeyError:
                return alone(leaf)

    else:
        for _, value, kind in visit(tree, is_leaf=is_leaf):
            if isinstance(kind, NodeType):
                check(value, kind)
        leaves = [leaf for _, leaf in visited()]
        pending: dict[int, deque[Any]] = {}
        for leaf, result in zip(leaves, f.move_leaves(leaves, where), strict=True):
            pending.setdefault(id(leaf), deque()).append(result)

        def moved(leaf: Any) -> Any:
            found = pending.get(id(leaf))
            if found is None:
                return alone(leaf)
            return found.popleft() if len(found) > 1 else found[0]

    def alone(leaf: Any) -> Any:
        """Moves what was not there before: a leaf that its node has made on the fly."""
        return leaf if kind_of(type(leaf)) is ATOM else f.move_leaves([leaf], lambda _: None)[0]

    # The ids are valid as long as the leaves live: until the map that uses them is gone.
    moved.__dict__["leaves"] = leaves
    return moved


def _collected(
    tree: Any,
    is_leaf: Callable[[Any], bool] | None,
    known: Mapping[Any, Any] | None,
    check: Callable[[Any, NodeType], None],
) -> list[Any]:
    """Each leaf of a tree once, without its path, which costs more than all the rest."""
    seen: dict[Any, Any] = dict(known or ())
    leaves: list[Any] = []
    found = leaves.append
    stack: list[Any] = []
    items: Any = iter(((None, tree),))
    while True:
        for _, child in items:
            i = id(child)
            if i in seen:
                continue
            kind = kind_of(type(child))
            if kind is LEAF:
                seen[i] = child
                found(child)
            elif kind is ATOM:
                continue
            elif kind is INTERNED:
                found(child)
            elif is_leaf is not None and is_leaf(child):
                seen[i] = child
                found(child)
            elif isinstance(kind, NodeType):
                seen[i] = child
                check(child, kind)
                try:
                    inner = iter(kind.items(child))
                except FmapperError:  # this walk raises it too, and knows the path
                    for _ in visit(tree, is_leaf=is_leaf, once=True, known=known):
                        pass
                    raise
                stack.append(items)
                items = inner
                break
        else:
            if not stack:
                return leaves
            items = stack.pop()
