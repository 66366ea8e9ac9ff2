"""Node types: how instances of a class are flattened and rebuilt, or which leaves they are."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Self, TypeAlias


class Kind(enum.Enum):
    """The kind of an object that is not a node with children."""

    LEAF = "given to f, and remembered"
    ATOM = "given to f every time: numbers and strings have no identity"
    INTERNED = "an atom that counts as an array when it is moved: np.True_ and np.False_"
    CHILDLESS = "a node without children that is its own copy: None, () and no_gradient"
    PENDING = "a node that exists only once its children do"
    FITTED = "a leaf of which some nodes make something of their own: torch modules, parameters"

    __hash__ = object.__hash__  # quicker than that of an enum


LEAF, ATOM, INTERNED, CHILDLESS, PENDING, FITTED = Kind
LEAVES = frozenset({LEAF, ATOM, INTERNED})
WITHOUT_IDENTITY = frozenset({ATOM, INTERNED})
ATOMS = frozenset({int, float, complex, bool, str, bytes, type(Ellipsis), type(NotImplemented)})


class Fitting(dict[Any, Any]):
    """Slots whose node makes something of its own of a leaf, which is then so at every place."""

    __slots__ = ()

    def fit(self, new: Any, old: Any) -> Any:
        """Wraps `new` for the place of `old`."""
        raise NotImplementedError


class Kept(list[Any]):
    """Objects that must outlive a walk, and what is left to do at its end.

    Attributes:
        at_end: Called with a function that gives what an object of the tree has become, and the
            object itself if it was not in the tree.
        refitted: What was fitted only after it had been put elsewhere, and what it has become.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_end: list[Callable[[Callable[[Any], Any]], None]] = []
        self.refitted: list[tuple[Any, Any]] = []


walking: ContextVar[Kept | None] = ContextVar("fmapper_walking", default=None)
"""What the walk of a user's own that is under way keeps; its nodes are rebuilt one by one."""


def at_end(keep: Callable[[Any], None], todo: Callable[[Callable[[Any], Any]], None]) -> None:
    """Schedules `todo(new_of)` for when all nodes of the tree are rebuilt."""
    kept = getattr(keep, "__self__", None)
    if isinstance(kept, Kept):
        kept.at_end.append(todo)


def refit(keep: Callable[[Any], None], before: Any, after: Any) -> None:
    """Schedules a leaf that was wrapped late to be replaced at its earlier places."""
    kept = getattr(keep, "__self__", None)
    if isinstance(kept, Kept):
        kept.refitted.append((before, after))


Item: TypeAlias = "tuple[Any, Any]"
Finish: TypeAlias = "Callable[[Any], Any] | None"
Opened: TypeAlias = "tuple[Any, Iterator[Item], Any, Finish]"
Opener: TypeAlias = "Callable[[Any, Callable[[Any], None]], Opened]"
"""`open(node, keep) -> (new, items, slots, finish)`: the new node, or PENDING where it cannot
exist yet; the (key, child) pairs; where `slots[key] = new child` goes; what makes the new node of
the full slots, or None where filling them was all. `keep` is handed what must outlive the walk."""

_EMPTY = ()


class NodeType:
    """The functions that flatten and rebuild instances of a class; adapters make their own.

    The attributes that stand here with their defaults are for others: see `fmapper.backends`.

    Args:
        children: `node -> {key: child}`, in order.
        rebuild: `(node, new_children) -> new node`. Needed where `shell` is not given.
        shell: `node -> new node without children`. Where it is given, the shell exists before its
            children do, so that cycles through the node work.
        fill: `(shell, node, new_children) -> None` puts the children into the shell.
        plain: What `fmapstructure` puts in its place: dict, list or tuple.
    """

    carried: Callable[[Any], Iterable[Item]] | None = None
    borrowed: tuple[Any, ...] = ()
    aside: Callable[[Any], Iterable[Item]] | None = None
    follows: Callable[[Any], Iterable[Item]] | None = None
    passengers: Callable[[Any], Iterable[Item]] | None = None
    put: Callable[[Any, Mapping[Any, Any]], object] | None = None
    static: Callable[[Any], Any] | None = None
    box: Callable[[Any], Iterable[Item]] | None = None
    pytree: bool = False

    def __init__(
        self,
        children: Callable[[Any], Mapping[Any, Any]],
        rebuild: Callable[[Any, Mapping[Any, Any]], Any] | None = None,
        *,
        shell: Callable[[Any], Any] | None = None,
        fill: Callable[[Any, Any, Mapping[Any, Any]], None] | None = None,
        plain: type = dict,
    ) -> None:
        if (shell is None) != (fill is None) or (shell is None) == (rebuild is None):
            raise TypeError("NodeType takes rebuild, or shell and fill.")

        def open(node: Any, keep: Callable[[Any], None]) -> Opened:
            found = children(node)
            keep(found)
            if shell is None:
                assert rebuild is not None
                return PENDING, iter(found.items()), dict(found), functools.partial(rebuild, node)
            new = shell(node)

            def finish(slots: Mapping[Any, Any]) -> Any:
                assert fill is not None
                fill(new, node, slots)
                return new

            return new, iter(found.items()), dict(found), finish

        self.open: Opener = open
        self._items: Callable[[Any], Iterable[Item]] = lambda node: children(node).items()
        self.plain = plain

    @classmethod
    def from_opener(
        cls, open: Opener, items: Callable[[Any], Iterable[Item]], plain: type = dict
    ) -> Self:
        """Makes a node type with an opener of its own, which is faster.

        Args:
            open: See `Opener`.
            items: `node -> [(key, child)]`, in order.
            plain: As above.
        """
        made: Self = object.__new__(cls)
        made.open, made._items, made.plain = open, items, plain
        return made

    def items(self, node: Any) -> Iterable[Item]:
        """Returns the (key, child) pairs of a node, in order."""
        return self._items(node)

    def children(self, node: Any) -> dict[Any, Any]:
        """Returns the children of a node by key, in order."""
        return dict(self._items(node))

    def rebuild(self, node: Any, new_children: Mapping[Any, Any]) -> Any:
        """Returns a new node with other children; the keys must be those of `children(node)`."""
        kept: list[Any] | None = walking.get()
        new, items, slots, finish = self.open(node, [].append if kept is None else kept.append)
        if new is CHILDLESS:
            return node
        for key, _ in items:
            slots[key] = new_children[key]
        return new if finish is None else finish(slots)

    def open_plain(self, node: Any, keep: Callable[[Any], None]) -> Opened:
        """Opens a node with a plain dict, list or tuple in its place."""
        items = tuple(self._items(node))
        keep(items)
        if node is _EMPTY:
            return CHILDLESS, iter(()), (), None
        if self.plain is dict:
            out: Any = dict(items)
            return out, iter(items), out, None
        slots = [child for _, child in items]
        positions = enumerate(slots.copy())
        if self.plain is list:
            return slots, positions, slots, None
        return PENDING, positions, slots, tuple
