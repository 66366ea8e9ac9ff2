"""The walk that rebuilds a tree around what a function makes of its leaves.

One loop, `TreeMap._run`, goes through the tree depth first on a stack of its own. What it meets is

* something it has met before, which a memo knows by its id: the result is the same object again,
* a leaf, which `f` gets,
* or a node. Its opener (`node_type.Opener`) gives a new, empty node, the children, and slots for
  what they become. The loop goes on with the children and comes back to finish the node.

Everything else here is one of three additions: a cursor, where there are paths or several trees; a
walk of the user's (`walk=`), which takes the place of a node's children; and functions that want to
see the whole tree first (`__fmap__`), which fill the memo beforehand.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from fmapper.errors import CycleError
from fmapper.tree import nodes
from fmapper.tree.children import default_walk, match_children, structural_walk
from fmapper.tree.containers import open_childless, open_dict
from fmapper.tree.keypath import KeyPath, Link
from fmapper.tree.no_gradient import no_gradient
from fmapper.tree.node_type import (
    CHILDLESS,
    FITTED,
    LEAF,
    PENDING,
    Fitting,
    Item,
    Kept,
    Kind,
    Opened,
    Opener,
    walking,
)
from fmapper.tree.nodes import opener_of, plain_opener_of
from fmapper.tree.walk import class_of, cycle_error, say_where, visit

Walk = Callable[..., Any]
Resolve = Callable[[type], "Opener | Kind"]


class Default(enum.Enum):
    """The default of an argument that was not given."""

    UNSET = "not given"


UNSET = Default.UNSET
_BETWEEN = object()  # the key while no child is looked at: a node is opened or closed
_EMPTY = ()


class TreeFunction(Protocol):
    """An `f` that sees the whole tree before a leaf is mapped: movers are of this kind."""

    def __fmap__(
        self, tree: Any, is_leaf: Callable[[Any], bool] | None, cache: dict[Any, Any] | None
    ) -> tuple[dict[int, Any], Callable[[Any], Any]]:
        """Maps leaves all at once: returns results by id, and a function for other leaves.

        Args:
            tree: The tree that was given to `fmap`.
            is_leaf: As given to `fmap`.
            cache: What is known beforehand, by id; None where ties are not kept, so that the
                function is to map all leaves.
        """
        ...


class TreeMap:
    """One call of `fmap` or of a relative: its arguments, and the memo while it runs.

    Args:
        f: `f(leaf, *rest_leaves)`, after the path if `with_path`.
        is_leaf, cache, prune, walk: As for `fmap`.
        with_path: Whether `f`, `is_leaf` and `walk` get the path first.
        memo: Results that are known beforehand.
        resolve: Finds the opener of a class; None for the one that rebuilds nodes.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        *,
        is_leaf: Callable[..., bool] | None = None,
        cache: dict[Any, Any] | Default | None = UNSET,
        prune: Any = UNSET,
        walk: Walk | None = None,
        with_path: bool = False,
        memo: dict[Any, Any] | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        if prune is not UNSET and cache is None:
            raise ValueError("prune= needs the memo: omit cache=None.")
        self.f, self.is_leaf, self.cache, self.prune = f, is_leaf, cache, prune
        self.walk = None if walk in (default_walk, structural_walk) else walk
        self.with_path = with_path
        self.memo: dict[Any, Any] = {} if memo is None else memo
        self.known: Mapping[int, Any] | None = None  # results for leaves alone
        self.kept = Kept()
        self.cursor: _Cursor | None = None
        self.raised = False  # an error in what a walk of the user's has asked for
        self.resolve = plain_opener_of if walk is structural_walk else resolve
        self.openers: dict[type, Opener | Kind] = {}  # where they are not the usual ones

    def look_first(self, f: TreeFunction, tree: Any) -> None:
        """Lets `f` map the leaves of a tree all at once, before the walk."""
        cache = {} if self.cache is UNSET else self.cache
        new, other = f.__fmap__(tree, self.is_leaf, cache)
        self.f = lambda leaf: new[id(leaf)] if id(leaf) in new else other(leaf)
        if self.prune is UNSET and self.cache is UNSET:
            self.known, self.memo = new, new.copy()

    def __call__(self, tree: Any, rest: tuple[Any, ...] = ()) -> Any:
        """Returns the mapped tree."""
        self.tree = tree
        if not isinstance(self.cache, dict):
            return self._map(tree, rest)
        # A memo of the user's outlives the call; if the map fails, it is left as it was.
        self.memo, entries = self.cache, len(self.cache)
        kept = self.memo.setdefault(id(self.memo), [])
        try:
            result = self._map(tree, rest)
        except BaseException:
            for added in list(self.memo)[entries:]:
                del self.memo[added]
            raise
        kept.extend((tree, rest, *self.kept))
        return result

    def _map(self, tree: Any, rest: tuple[Any, ...]) -> Any:
        if rest or self.with_path or self.walk is not None:
            self.cursor = _Cursor(rest, self)
        token = None if self.walk is None else walking.set(self.kept)
        try:
            result = self._run(tree)
        finally:
            self.openers.clear()  # they may hold on to this, and with it to all that was kept
            if token is not None:
                walking.reset(token)
        return self._complete(result, several=bool(rest))

    def _run(self, tree: Any, path: Callable[[], Sequence[Any]] = tuple) -> Any:
        """Maps a tree depth first, left to right, on an explicit stack: no depth is too deep.

        An entry of the stack is what an open node will need again: the items that its parent has
        left, where the parent's results go, its own key there and its identity, how the parent is
        finished. `path` says, if something goes wrong, where the tree is in the whole one.
        """
        f, is_leaf, prune, cursor = self.f, self.is_leaf, self.prune, self.cursor
        memo, known, keep = self.memo, self.known, self.kept.append
        openers: dict[type, Any] = self.openers
        walk, resolve = self.walk, self.resolve if self.walk is None else self._walker_of
        if resolve is None:
            openers, resolve = nodes.openers, opener_of
        ident: Callable[[Any], Any] = id
        if cursor is not None:
            f, is_leaf = cursor.call, None if is_leaf is None else cursor.ask
            if cursor.others:
                ident = cursor.identity
        caching = self.cache is not None
        remembered = LEAF if caching else None
        root: list[Any] = [None]
        stack: list[tuple[Any, ...]] = []
        items: Iterator[Item] = iter(((0, tree),))
        slots: Any = root
        finish: Any = None
        key: Any = 0
        try:
            while True:
                for key, child in items:
                    i = ident(child)
                    if i in memo:
                        if prune is not UNSET:
                            slots[key] = prune
                        elif memo[i] is PENDING:
                            raise _cycle(child, stack, key, i)
                        else:
                            slots[key] = memo[i]
                        continue
                    try:
                        open = openers[type(child)]
                    except KeyError:
                        open = resolve(type(child))
                        if openers is self.openers:
                            openers[type(child)] = open
                    if open is remembered:
                        memo[i] = slots[key] = f(child)
                    elif type(open) is Kind:
                        slots[key] = new = f(child)
                        if open is FITTED:
                            if new is not child and isinstance(slots, Fitting):
                                slots[key] = new = slots.fit(new, child)
                            if caching:
                                memo[i] = new
                    elif is_leaf is not None and is_leaf(child):
                        slots[key] = new = f(child)
                        if caching and open is not open_childless and child is not _EMPTY:
                            memo[i] = new
                    elif open is open_dict and cursor is None:  # the commonest node, in line
                        if known is not None:
                            try:  # a flat one, as a state dict is, takes no loop
                                new = {k: known[id(x)] for k, x in child.items()}
                                memo[i] = slots[key] = new
                                continue
                            except KeyError:  # no, it has nodes in it
                                pass
                        stack.append((items, slots, key, i, finish))
                        source = child.copy()
                        keep(source)
                        memo[i] = slots[key] = slots = source.copy()
                        items = iter(source.items())
                        finish = None
                        key = _BETWEEN  # noqa: PLW2901
                        break
                    else:
                        new, inner, inner_slots, inner_finish = open(child, keep)
                        if cursor is not None and walk is None:
                            inner = cursor.track(child, inner)
                        if new is CHILDLESS:
                            slots[key] = child
                            for _ in inner:  # several trees: they have no children here either
                                pass
                            continue
                        memo[i] = slots[key] = new
                        stack.append((items, slots, key, i, finish))
                        items = inner
                        slots = inner_slots
                        finish = inner_finish
                        key = _BETWEEN  # noqa: PLW2901
                        break
                else:
                    if not stack:
                        return root[0]
                    if finish is None:
                        items, slots, key, i, finish = stack.pop()
                    else:
                        key = _BETWEEN
                        new = finish(slots)
                        items, slots, key, i, finish = stack.pop()
                        memo[i] = slots[key] = new
                    if not caching:
                        del memo[i]
        except BaseException as error:
            keys = [entry[2] for entry in stack]
            if key is not _BETWEEN:
                keys.append(key)
            for entry in stack:  # a walk of the user's may catch the error and come back
                memo.pop(entry[3], None)
            if not self.raised or getattr(error, "placed", None) is False:
                say_where(error, (*path(), *keys[1:]))
            raise

    def _complete(self, result: Any, *, several: bool) -> Any:
        """Runs what was scheduled for when all nodes are rebuilt."""
        if self.kept.at_end:
            memo = self.memo
            if several:
                memo = {i[0]: new for i, new in memo.items() if isinstance(i, tuple)}
            for todo in self.kept.at_end:
                todo(lambda old: memo.get(id(old), old))
        if self.kept.refitted:
            again = {id(before): after for before, after in self.kept.refitted}
            result = refill(result, again)
            for i, new in self.memo.items():
                self.memo[i] = again.get(id(new), new)
        return result

    # A walk of the user's: a node opens without children, and is finished by calling the walk.

    def _walker_of(self, cls: type) -> Opener | Kind:
        """Returns an opener that hands the nodes of a class to the user's walk."""
        usual = opener_of(cls)
        if isinstance(usual, Kind):
            return usual

        def open(node: Any, keep: Callable[[Any], None]) -> Opened:
            cursor = self.cursor
            assert cursor is not None
            assert self.walk is not None
            if usual is open_childless or node is _EMPTY:
                for other in cursor.others:
                    match_children(node, {}, other)
                return CHILDLESS, iter(()), None, None
            args = cursor.arguments(node)
            keep(args)
            # What finishes a node is given its slots: here, the last of the walk's arguments.
            return PENDING, iter(()), args[-1], partial(self.walk, self._recurse, *args[:-1])

        return open

    def _recurse(self, *args: Any) -> Any:
        """Maps a child for the user's walk, which recurses on Python's stack."""
        cursor = self.cursor
        assert cursor is not None
        at = 1 if self.with_path else 0
        node = args[at]
        self.kept.append(args)
        cursor.go_to(args[:at], args[at + 1 :])
        self.raised = False
        try:
            return self._run(node, lambda: args[0].keys if at else self._find(node))
        except BaseException:
            self.raised = True
            raise

    def _find(self, wanted: Any) -> Sequence[Any]:
        """Finds the first path to an object, for an error message."""
        for link, value, _ in visit(self.tree, once=True):
            if value is wanted:
                return KeyPath.from_link(link).keys
        return ()


class _Cursor:
    """The position of a walk that has paths, several trees or a walk of the user's."""

    __slots__ = ("f", "is_leaf", "keep", "link", "others", "with_path")

    def __init__(self, others: tuple[Any, ...], mapping: TreeMap) -> None:
        self.link: Link = None
        self.others = others
        self.keep = mapping.kept.append
        self.f, self.is_leaf, self.with_path = mapping.f, mapping.is_leaf, mapping.with_path

    def call(self, leaf: Any) -> Any:
        """Calls `f` with a leaf and its counterparts."""
        others = self.others
        for other in others:
            if other is no_gradient:
                return leaf
        if self.with_path:
            return self.f(KeyPath.from_link(self.link), leaf, *others)
        return self.f(leaf, *others)

    def ask(self, node: Any) -> bool:
        """Calls `is_leaf` with a node."""
        assert self.is_leaf is not None
        if self.with_path:
            return self.is_leaf(KeyPath.from_link(self.link), node)
        return self.is_leaf(node)

    def go_to(self, place: tuple[Any, ...], others: tuple[Any, ...]) -> None:
        """Follows the user's walk to its path and the counterparts there."""
        self.others = others
        self.link = None
        for path in place:
            for key in path.keys:
                self.link = (self.link, key)

    def arguments(self, node: Any) -> tuple[Any, ...]:
        """Returns the arguments of the user's walk at a node."""
        place = (KeyPath.from_link(self.link),) if self.with_path else ()
        return (*place, node, *self.others)

    def track(self, node: Any, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items of a node and moves the cursor to each."""
        parent = self.link
        if not self.others:
            for key, child in items:
                self.link = (parent, key)
                yield key, child
            return
        have = dict(items)
        matched = [match_children(node, have, other) for other in self.others]
        self.keep(matched)
        for key, child in have.items():
            self.link = (parent, key)
            self.others = tuple([found[key] for found in matched])
            yield key, child

    def identity(self, child: Any) -> tuple[int, ...]:
        """Returns the ids of a node in all trees: a tie counts where all of them are tied."""
        return (id(child), *map(id, self.others))


def _cycle(child: Any, stack: list[tuple[Any, ...]], key: Any, i: Any) -> CycleError:
    """Returns the error for a child that is still open further up the stack."""
    keys = [entry[2] for entry in stack]
    at = next((depth for depth, entry in enumerate(stack) if entry[3] == i), None)
    if at is None:
        error = CycleError(f"a walk came back to this {class_of(child)} from inside it.")
        error.placed = False
        return error
    first: Link = None
    for step in keys[1 : at + 1]:
        first = (first, step)
    again = first
    for step in [*keys[at + 1 :], key]:
        again = (again, step)
    error = cycle_error(child, first, again)
    error.placed = True
    return error


def refill(tree: Any, memo: dict[Any, Any], f: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Replaces the objects of a tree whose ids are in the memo.

    The memo knows then what each node has become.
    """
    return TreeMap(f, memo=memo)(tree)
