"""Reads and replaces the arrays of a tree again and again, without names and paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fmapper.backends.discovery import adapter_of
from fmapper.errors import SyncError
from fmapper.moves.inplace import putter, without_interrupt
from fmapper.tree.fmap import fmap
from fmapper.tree.keypath import Link, format_link
from fmapper.tree.nodes import NodeType, kind_of


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the tree.

    Attributes:
        kind: How to take it apart.
        cls: Its class.
        link: Its place, for errors.
        parent: The number of the node that it is a child of.
        key: Its key there.
        count: The number of its children.
        arrays: The keys of arrays among them, each with the number of the array.
    """

    kind: NodeType
    cls: type
    link: Link
    parent: int
    key: Any
    count: int
    arrays: list[tuple[Any, int]] = field(default_factory=list)


class Reader:
    """The nodes of a tree in a flat list.

    A node that is replaced by another of its class is followed; other changes are errors.

    Attributes:
        first: The arrays when the tree was looked at, each once.
    """

    def __init__(self, tree: Any) -> None:
        self._nodes: list[_Node] = []
        self.first: list[Any] = []
        numbers: dict[int, int] = {}
        seen: set[int] = set()
        stack: list[tuple[Any, Link, int, Any]] = [(tree, None, -1, None)]
        while stack:
            value, link, parent, key = stack.pop()
            kind = kind_of(type(value))
            if not isinstance(kind, NodeType) or id(value) in seen:
                continue
            seen.add(id(value))
            children = kind.children(value)
            constants = () if kind.constants is None else kind.constants(value)
            node = _Node(kind, type(value), link, parent, key, len(children))
            for name, child in children.items():
                if name in constants:
                    continue
                if adapter_of(child) is None:
                    stack.append((child, (link, name), len(self._nodes), name))
                    continue
                if id(child) not in numbers:
                    numbers[id(child)] = len(self.first)
                    self.first.append(child)
                node.arrays.append((name, numbers[id(child)]))
            self._nodes.append(node)

    def read(self, tree: Any) -> list[Any]:
        """Returns the arrays of the tree, or of another one of the same structure.

        Raises:
            SyncError: The structure is another one than it was.
        """
        return self._read(tree)[0]

    def _read(self, tree: Any) -> tuple[list[Any], list[Any], list[Mapping[Any, Any]]]:
        arrays: list[Any] = [None] * len(self.first)
        nodes: list[Any] = []
        children: list[Mapping[Any, Any]] = []
        for node in self._nodes:
            value = tree if node.parent < 0 else children[node.parent].get(node.key)
            if type(value) is not node.cls:
                raise SyncError(
                    f"{format_link(node.link)} was a {node.cls.__name__} when the sync was "
                    f"planned, and is a {type(value).__name__} now. Create another Sync"
                )
            own = node.kind.children(value)
            if len(own) != node.count:
                raise SyncError(
                    f"{format_link(node.link)} had {node.count} children when the sync was "
                    f"planned, and has {len(own)} now. Create another Sync"
                )
            nodes.append(value)
            children.append(own)
            for key, number in node.arrays:
                arrays[number] = own.get(key)
        return arrays, nodes, children

    def write(self, tree: Any, new: Mapping[int, Any]) -> Any:
        """Puts arrays into the tree by their numbers, all or none.

        Returns:
            The tree; a new one where a node cannot be changed.
        """
        if not new:
            return tree
        arrays, nodes, children = self._read(tree)
        steps: list[tuple[Callable[[Any, Mapping[Any, Any]], object], Any, Any, Any]] = []
        for node, value, own in zip(self._nodes, nodes, children, strict=True):
            changed = {key: new[number] for key, number in node.arrays if number in new}
            if not changed:
                continue
            put = putter(value, node.kind)
            if put is None:
                return _refilled(tree, {id(arrays[at]): array for at, array in new.items()})
            steps.append((put, value, {**own, **changed}, own))
        without_interrupt(lambda: _carry_out(steps))
        return tree


def _refilled(tree: Any, new: Mapping[int, Any]) -> Any:
    """Returns a new tree with arrays by the ids of the old ones."""
    return fmap(lambda leaf: new.get(id(leaf), leaf), tree)


def _carry_out(steps: Sequence[tuple[Any, Any, Any, Any]]) -> None:
    """Puts new children into nodes, and the old ones back if that fails."""
    begun = 0
    try:
        for put, node, new, _ in steps:
            begun += 1
            put(node, new)
    except BaseException:
        for put, node, _, old in reversed(steps[:begun]):
            with suppress(BaseException):
                put(node, old)
        raise
