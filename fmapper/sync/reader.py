"""Reads and replaces the arrays of a tree again and again, without names and paths."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from fmapper.backends.discovery import adapter_of
from fmapper.errors import SyncError
from fmapper.tree.keypath import Link, format_link
from fmapper.tree.nodes import NodeType
from fmapper.tree.walk import walk


class _Node(NamedTuple):
    kind: NodeType  # how to take it apart
    cls: type
    link: Link  # its place, for errors
    parent: int  # the number of the node that it is a child of
    key: Any  # its key there
    size: int  # the number of its children
    arrays: list[tuple[Any, int]]  # the keys of arrays among them, and the numbers of those


class Reader:
    """The nodes of a tree in a flat list.

    A node that is replaced by another of its class is followed; other changes are errors.

    Attributes:
        first: The arrays when the tree was looked at, each once.
    """

    def __init__(self, tree: Any) -> None:
        from fmapper.states.state import items_in_state

        self._nodes: list[_Node] = []
        self.first: list[Any] = []
        numbers: dict[int, int] = {}
        places: dict[int, int] = {}
        for link, value, kind, _ in walk(tree, once=False, enter=items_in_state):
            above = places[id(link[0])] if link is not None and link[0] is not None else 0
            key = None if link is None else link[1]
            if isinstance(kind, NodeType):
                places[id(link)] = len(self._nodes)
                parent = -1 if link is None else above
                size = len(kind.children(value))
                self._nodes.append(_Node(kind, type(value), link, parent, key, size, []))
            elif adapter_of(value) is not None and self._nodes:
                if id(value) not in numbers:
                    numbers[id(value)] = len(self.first)
                    self.first.append(value)
                self._nodes[above].arrays.append((key, numbers[id(value)]))
        self._count = len(self.first)

    def read(self, tree: Any) -> list[Any]:
        """Returns the arrays of the tree, or of another one of the same structure.

        Raises:
            SyncError: The structure is another one than it was.
        """
        return self._read(tree)[0]

    def _read(self, tree: Any) -> tuple[list[Any], list[Any], list[Mapping[Any, Any]]]:
        arrays: list[Any] = [None] * self._count
        nodes: list[Any] = []
        children: list[Mapping[Any, Any]] = []
        for node in self._nodes:
            value = tree if node.parent < 0 else children[node.parent].get(node.key)
            if type(value) is not node.cls:
                now = f"is a {type(value).__name__}"
                raise _mismatch(node.link, f"was a {node.cls.__name__}", now)
            inner = node.kind.children(value)
            if len(inner) != node.size:
                was, now = f"had {node.size} children", f"has {len(inner)}"
                raise _mismatch(node.link, was, now)
            nodes.append(value)
            children.append(inner)
            for key, number in node.arrays:
                array = inner.get(key)
                if arrays[number] is not None and arrays[number] is not array:
                    was, now = "was tied to another array", "is one of its own"
                    raise _mismatch((node.link, key), was, now)
                arrays[number] = array
        return arrays, nodes, children

    def write(self, tree: Any, new: Mapping[int, Any]) -> Any:
        """Puts arrays into the tree by their numbers, all or none.

        Returns:
            The tree; a new one where a node cannot be changed.
        """
        from fmapper.moves.inplace import carry_out, putter
        from fmapper.tree.fmap import fmap

        if not new:
            return tree
        arrays, nodes, children = self._read(tree)
        steps = []
        for node, value, inner in zip(self._nodes, nodes, children, strict=True):
            changed = {key: new[number] for key, number in node.arrays if number in new}
            put = putter(value, node.kind) if changed else None
            if put is not None:
                steps.append(
                    (partial(put, value, {**inner, **changed}), partial(put, value, inner))
                )
            elif changed:  # it cannot change
                break
        else:
            carry_out(steps)
            return tree
        renewed = {id(arrays[at]): array for at, array in new.items()}
        return fmap(lambda leaf: renewed.get(id(leaf), leaf), tree)


def _mismatch(link: Link, was: str, now: str) -> SyncError:
    text = f"{format_link(link)} {was} when the sync was planned, and {now} now"
    return SyncError(f"{text}. Create another Sync")
