"""Maps that want all leaves of a tree at once: movers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from fmapper.errors import FmapperError
from fmapper.tree.functor import has_class_attribute
from fmapper.tree.keypath import Link
from fmapper.tree.nodes import ATOM, INTERNED, LEAF, Aside, NodeType, kind_of, kinds
from fmapper.tree.walk import visit

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

    def check_borrowed(self, node: Any, missing: Any, where: Where) -> None:
        """Called where a node borrows a leaf that nothing else in the tree has.

        Args:
            node: The node.
            missing: The leaf.
            where: Gives the path of either.
        """
        ...

    @property
    def uncast(self) -> LeafBatch:
        """The same for leaves that are to keep their dtype."""
        ...


class PerTree(Protocol):
    """What becomes a batch when it sees the tree, because its answer depends on all paths there."""

    def for_tree(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
        """The batch for one tree."""
        ...


def is_batch(f: Any) -> bool:
    """Whether a function for `fmap` wants all leaves at once."""
    cls = type(f)  # an `nnx.Rngs` has every attribute that it is asked for
    return has_class_attribute(cls, "check_node") or has_class_attribute(cls, "for_tree")


def for_tree(batch: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The batch that goes through a tree; nearly always the one that was given."""
    return batch.for_tree(tree, is_leaf) if has_class_attribute(type(batch), "for_tree") else batch


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
        self._batch: LeafBatch = for_tree(batch, tree, is_leaf)
        self._visit = partial(visit, tree, is_leaf=is_leaf, once=once, known=known or ())
        self._once = once
        self._links: dict[int, Link] = {}
        self._aside: dict[int, tuple[Any, Aside]] = {}
        self._passengers: dict[int, tuple[Any, Any, Any]] = {}
        self._pending: dict[int, deque[Any]] = {}
        self.memo: dict[Any, Any] = {}
        if once:
            # The ids are valid as long as the leaves are kept.
            self._leaves = _collected(tree, is_leaf, known, self._check, self._check_borrowed)
            for i, (passenger, _, _) in self._passengers.items():
                self._leaves.setdefault(i, passenger)
            new = self._moved([*self._leaves.values()])
            self.memo = dict(zip(self._leaves, new, strict=True))
            return
        # Ties are cut, so this time nobody asks whose the parameters of an optimizer are.
        for _, value, kind in self._visit():
            if isinstance(kind, NodeType):
                self._check(value, kind)
        leaves = [leaf for _, leaf in self._visited()]
        for leaf, result in zip(leaves, self._moved(leaves), strict=True):
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

    def _moved(self, leaves: list[Any]) -> Sequence[Any]:
        """What all leaves have become, those that do not go with the others included."""
        if not self._aside:
            return self._batch.move_leaves(leaves, self._where(leaves))
        results = list(leaves)
        rules = [self._aside.get(id(leaf), (leaf, None))[1] for leaf in leaves]
        for rule, batch in ((None, self._batch), (Aside.UNCAST, self._batch.uncast)):
            chosen = [at for at, own in enumerate(rules) if own is rule]
            if chosen:
                part = [leaves[at] for at in chosen]
                for at, new in zip(chosen, batch.move_leaves(part, self._where(part)), strict=True):
                    results[at] = new
        return results

    def _check(self, node: Any, node_type: NodeType) -> None:
        if node_type.aside is not None:
            self._aside.update((id(leaf), (leaf, rule)) for leaf, rule in node_type.aside(node))
        if node_type.passengers is not None:
            for name, passenger in node_type.passengers(node):
                self._passengers.setdefault(id(passenger), (passenger, node, name))
        self._batch.check_node(node, node_type, self._where_any)

    def _check_borrowed(self, node: Any, missing: Any) -> None:
        self._batch.check_borrowed(node, missing, self._where_any)

    def _visited(self) -> Iterator[tuple[Link, Any]]:
        met = set()
        for link, value, kind in self._visit():
            if kind is None and kind_of(type(value)) is not ATOM and id(value) not in met:
                if self._once:
                    met.add(id(value))
                yield link, value

    def _where(self, leaves: Sequence[Any]) -> Where:
        """The paths of some leaves, by their index."""

        def where(index: int) -> Link:
            if not self._links:
                for link, leaf in self._visited():
                    self._links.setdefault(id(leaf), link)
            i = id(leaves[index])
            if i not in self._links:
                _, node, name = self._passengers[i]
                self._links[i] = (self._where_any(node), name)
            return self._links[i]

        return where

    def _where_any(self, wanted: Any) -> Link:
        return next((link for link, value, _ in self._visit() if value is wanted), None)


def _holds_only_leaves(node: dict[Any, Any]) -> bool:
    """Whether a dict is a flat one of arrays, as a state dict is; False where none was met yet."""
    return all(kinds.get(cls) is LEAF for cls in {*map(type, node.values())})


def _collected(
    tree: Any,
    is_leaf: Callable[[Any], bool] | None,
    known: Mapping[Any, Any] | None,
    check: Callable[[Any, NodeType], None],
    check_borrowed: Callable[[Any, Any], None],
) -> dict[int, Any]:
    """Each leaf of a tree by its id, without its path, which costs more than all the rest.

    Nodes that borrow leaves come last, and what they borrow comes after all else.
    """
    seen: dict[Any, Any] = dict(known or ())
    leaves: dict[int, Any] = {}
    stack: list[Any] = []
    borrowers: list[tuple[Any, NodeType]] = []
    debts: list[tuple[Any, Any]] = []
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
                if type(child) is dict and not known and _holds_only_leaves(child):
                    leaves.update(zip(map(id, child.values()), child.values(), strict=True))
                    continue
                if kind.borrowed:
                    borrowers.append((child, kind))
                    continue
                try:
                    inner = iter(kind.items(child))
                except FmapperError:  # this walk raises it too, and knows the path
                    for _ in visit(tree, is_leaf=is_leaf, once=True, known=known or ()):
                        pass
                    raise
                stack.append(items)
                items = inner
                break
        else:
            if stack:
                items = stack.pop()
            elif borrowers:
                node, kind = borrowers.pop(0)
                own = []
                for key, child in kind.items(node):
                    if key in kind.borrowed:
                        debts.append((node, child))
                    else:
                        own.append((key, child))
                items = iter(own)
            elif debts:
                node, child = debts.pop(0)
                for _, leaf, leaf_kind in visit(child, is_leaf=is_leaf, once=True):
                    if leaf_kind is None and id(leaf) not in leaves and id(leaf) not in seen:
                        check_borrowed(node, leaf)
                items = iter(((None, child),))
            else:
                return leaves
