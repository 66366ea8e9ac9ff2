"""Maps that want all leaves of a tree at once: movers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from fmapper._errors import FmapperError
from fmapper._keypath import Link
from fmapper._nodes import ATOM, INTERNED, LEAF, NodeType, kind_of, kinds
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


class PerTree(Protocol):
    """What becomes a batch when it sees the tree, because its answer depends on all paths there."""

    def for_tree(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
        """The batch for one tree."""
        ...


def is_batch(f: Any) -> bool:
    """Whether a function for `fmap` wants all leaves at once."""
    return hasattr(f, "check_node") or hasattr(f, "for_tree")


def for_tree(batch: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The batch that goes through a tree; nearly always the one that was given."""
    own = getattr(batch, "for_tree", None)
    return batch if own is None else own(tree, is_leaf)


class MovedLeaves:
    """Has all leaves of a tree moved at once; then it is the map from each to what it has become.

    Args:
        batch: Moves them.
        tree: Anything.
        is_leaf: Nodes for which it is true are leaves too.
        once: Whether a leaf that occurs at several places is moved once, or once for each.
        known: With `once`: a memo with what needs no moving.

    Attributes:
        memo: With `once`: id of a leaf -> what it has become.
    """

    def __init__(
        self,
        batch: LeafBatch,
        tree: Any,
        *,
        is_leaf: Callable[[Any], bool] | None = None,
        once: bool = True,
        known: Mapping[Any, Any] | None = None,
    ) -> None:
        self._batch = batch = for_tree(batch, tree, is_leaf)
        self._visit = partial(visit, tree, is_leaf=is_leaf, once=once, known=known)
        self._once = once
        self._links: list[Link] = []
        self._pending: dict[int, deque[Any]] = {}
        self.memo: dict[Any, Any] = {}
        if once:
            self._leaves = _collected(tree, is_leaf, known, self._check)  # valid ids need them
            new = batch.move_leaves([*self._leaves.values()], self._where)
            self.memo = dict(zip(self._leaves, new, strict=True))
            return
        for _, value, kind in self._visit():
            if isinstance(kind, NodeType):
                self._check(value, kind)
        leaves = [leaf for _, leaf in self._visited()]
        for leaf, result in zip(leaves, batch.move_leaves(leaves, self._where), strict=True):
            self._pending.setdefault(id(leaf), deque()).append(result)

    def __call__(self, leaf: Any) -> Any:
        """What a leaf has become."""
        if kind_of(type(leaf)) is ATOM:
            return leaf
        i = id(leaf)
        if i in self.memo:
            return self.memo[i]
        if i in self._pending:
            found = self._pending[i]
            return found.popleft() if len(found) > 1 else found[0]
        # It was not there before: its node has made it on the fly.
        return self._batch.move_leaves([leaf], lambda _: None)[0]

    def _check(self, node: Any, node_type: NodeType) -> None:
        self._batch.check_node(node, node_type, self._where_node)

    def _visited(self) -> Iterator[tuple[Link, Any]]:
        met = set()
        for link, value, kind in self._visit():
            if kind is None and kind_of(type(value)) is not ATOM and id(value) not in met:
                if self._once:
                    met.add(id(value))
                yield link, value

    def _where(self, index: int) -> Link:
        if not self._links:
            self._links = [link for link, _ in self._visited()]
        return self._links[index]

    def _where_node(self, node: Any) -> Link:
        return next((link for link, value, _ in self._visit() if value is node), None)


def _collected(
    tree: Any,
    is_leaf: Callable[[Any], bool] | None,
    known: Mapping[Any, Any] | None,
    check: Callable[[Any, NodeType], None],
) -> dict[int, Any]:
    """Each leaf of a tree by its id, without its path, which costs more than all the rest."""
    seen: dict[Any, Any] = dict(known or ())
    leaves: dict[int, Any] = {}
    stack: list[Any] = []
    items: Any = iter(((None, tree),))
    while True:
        for _, child in items:
            i = id(child)
            if i in leaves or i in seen:
                continue
            try:
                kind = kinds[type(child)]
            except KeyError:
                kind = kind_of(type(child))
            if kind is LEAF or kind is INTERNED:
                leaves[i] = child
            elif kind is ATOM:
                continue
            elif is_leaf is not None and is_leaf(child):
                leaves[i] = child
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
