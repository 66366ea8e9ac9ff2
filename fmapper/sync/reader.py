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
    keys: list[Any]  # of arrays among them
    numbers: list[int]  # of those


class Reader:
    """The nodes of a tree in a flat list.

    A node that is replaced by another of its class is followed; other changes are errors.
    """

    def __init__(self, tree: Any) -> None:
        from fmapper.states.state import items_in_state

        self._nodes: list[_Node] = []
        self.first: list[Any] = []  # the arrays at the time, each once
        numbers: dict[int, int] = {}
        places: dict[int, int] = {}
        for link, value, kind, _ in walk(tree, once=False, enter=items_in_state):
            above = places[id(link[0])] if link is not None and link[0] is not None else 0
            key = None if link is None else link[1]
            if isinstance(kind, NodeType):
                places[id(link)] = len(self._nodes)
                parent = -1 if link is None else above
                size = len(kind.children(value))
                self._nodes.append(_Node(kind, type(value), link, parent, key, size, [], []))
            elif adapter_of(value) is not None and self._nodes:
                if id(value) not in numbers:
                    numbers[id(value)] = len(self.first)
                    self.first.append(value)
                self._nodes[above].keys.append(key)
                self._nodes[above].numbers.append(numbers[id(value)])
        pairs = ((node, zip(node.keys, node.numbers, strict=True)) for node in self._nodes)
        every = [(node.link, *pair) for node, each in pairs for pair in each]
        places = {number: at for at, (*_, number) in reversed([*enumerate(every)])}
        self._firsts = [places[number] for number in range(len(self.first))]
        self._ties = [(at, each) for at, each in enumerate(every) if places[each[2]] != at]

    def read(self, tree: Any) -> list[Any]:
        """Returns the arrays of the tree, or of another one of the same structure."""
        return self._read(tree)[0]

    def _read(self, tree: Any) -> tuple[list[Any], list[Any], list[Mapping[Any, Any]]]:
        every: list[Any] = []
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
            every += map(inner.get, node.keys)
        arrays = [every[at] for at in self._firsts]
        for at, (link, key, number) in self._ties:
            if every[at] is not arrays[number]:
                raise _mismatch((link, key), "was tied to another array", "is one of its own")
        return arrays, nodes, children

    def write(self, tree: Any, new: Mapping[int, Any]) -> Any:
        """Puts arrays into the tree, all or none; returns a new one where that cannot change."""
        from fmapper.moves.inplace import carry_out, putter
        from fmapper.tree.fmap import fmap

        if not new:
            return tree
        arrays, nodes, children = self._read(tree)
        steps = []
        for node, value, inner in zip(self._nodes, nodes, children, strict=True):
            numbered = zip(node.keys, node.numbers, strict=True)
            changed = {key: new[number] for key, number in numbered if number in new}
            put = putter(value, node.kind) if changed else None
            if put is not None:
                every = {**inner, **changed}
                steps.append((partial(put, value, every), partial(put, value, inner)))
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
