"""Collects the leaves of a tree, each once, and the facts about them that nodes declare."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from fmapper.backends.node_type import Aside
from fmapper.errors import FmapperError
from fmapper.tree.keypath import Link
from fmapper.tree.nodes import ATOM, INTERNED, LEAF, NodeType, kind_of, kinds
from fmapper.tree.walk import visit


class Leaves:
    """The leaves of a tree that may move.

    Objects without identity, such as numbers, are not among them. Leaves are collected without
    their paths, which would take most of the time; `where` searches for one when a message needs
    it.

    Args:
        tree: Anything.
        is_leaf: Nodes for which it is true are leaves too.
        skip: Ids of objects to leave out.

    Attributes:
        by_id: The leaves, then the passengers of nodes. The ids are valid as long as this is kept.
        nodes: The nodes, each once, with their types.
        aside: By id, the rules for leaves that do not move like the others.
        missing: Pairs of a node and a leaf that it borrows but that nothing else in the tree has.
    """

    def __init__(
        self,
        tree: Any,
        is_leaf: Callable[[Any], bool] | None = None,
        skip: Collection[Any] = (),
    ) -> None:
        self.by_id: dict[int, Any] = {}
        self.nodes: list[tuple[Any, NodeType]] = []
        self.aside: dict[int, Aside] = {}
        self.missing: list[tuple[Any, Any]] = []
        self._tree, self._is_leaf, self._skip = tree, is_leaf, skip
        self._passengers: dict[int, tuple[Any, Any]] = {}
        self._links: dict[int, Link] = {}
        self._kept: list[Any] = []
        self._collect()
        for node, kind in self.nodes:
            if kind.aside is not None:
                for leaf, rule in kind.aside(node):
                    self.aside[id(leaf)] = rule
                    self._kept.append(leaf)
            if kind.passengers is not None:
                for name, passenger in kind.passengers(node):
                    self._passengers.setdefault(id(passenger), (node, name))
                    self.by_id.setdefault(id(passenger), passenger)

    def where(self, wanted: Any) -> Link:
        """Returns the first path to a leaf, a passenger or a node."""
        if not self._links:
            for link, value, _ in self._visit(self._tree):
                self._links.setdefault(id(value), link)
            for i, (node, name) in self._passengers.items():
                self._links.setdefault(i, (self._links.get(id(node)), name))
        return self._links.get(id(wanted))

    def _visit(self, tree: Any) -> Any:
        return visit(tree, is_leaf=self._is_leaf, once=True, skip=self._skip)

    def _collect(self) -> None:
        """Collects leaves and nodes; nodes that borrow leaves come last, then these leaves."""
        leaves, nodes, is_leaf = self.by_id, self.nodes, self._is_leaf
        seen = set(self._skip)
        stack: list[Any] = []
        borrowers: list[tuple[Any, NodeType]] = []
        debts: list[tuple[Any, Any]] = []
        items: Any = iter(((None, self._tree),))
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
                    seen.add(i)
                    nodes.append((child, kind))
                    if type(child) is dict and not self._skip and _holds_only_leaves(child):
                        leaves.update(zip(map(id, child.values()), child.values(), strict=True))
                        continue
                    if kind.borrowed:
                        borrowers.append((child, kind))
                        continue
                    try:
                        inner = iter(kind.items(child))
                    except FmapperError:  # the next walk raises this error again, with the path
                        for _ in self._visit(self._tree):
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
                    children = []
                    for key, child in kind.items(node):
                        if key in kind.borrowed:
                            debts.append((node, child))
                        else:
                            children.append((key, child))
                    items = iter(children)
                elif debts:
                    node, child = debts.pop(0)
                    for _, leaf, leaf_kind in self._visit(child):
                        if leaf_kind is None and id(leaf) not in leaves:
                            self.missing.append((node, leaf))
                    items = iter(((None, child),))
                else:
                    return


def _holds_only_leaves(node: dict[Any, Any]) -> bool:
    """Returns whether a dict holds only arrays whose classes are already known."""
    return all(kinds.get(cls) is LEAF for cls in {*map(type, node.values())})
