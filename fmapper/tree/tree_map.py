"""The walk that rebuilds a tree around the results of a function for its leaves.

One loop, `TreeMap._run`, goes through the tree depth first on a stack of its own. It meets

* objects that it has met before: the memo has the result by id, so it is the same object again, *
leaves, which it passes to `f`, * and nodes. An opener (`nodes.Opener`) returns a new, empty node,
the children, and slots for the new children. The loop goes on with the children and comes back to
finish the node.

Everything else here is one of three additions: a cursor, where there are paths or several trees; a
walk of the user's (`walk=`), which takes the place of the loop; and functions that want to see the
whole tree first (`__fmap__`), which fill the memo beforehand.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fmapper.errors import CycleError
from fmapper.tree.containers import DICT
from fmapper.tree.keypath import KeyPath, Link
from fmapper.tree.nodes import (
    CHILDLESS,
    LEAF,
    LEAVES,
    PENDING,
    Item,
    Kept,
    Kind,
    NodeType,
    kind_of,
    kinds,
    no_gradient,
    node_type_of,
    plain_type_of,
    sync,
    walking,
)
from fmapper.tree.walk import cycle_error, match_children, say_where, visit

Walk = Callable[..., Any]
Resolve = Callable[[type], "NodeType | Kind"]


class Default(enum.Enum):
    """The default value that marks an omitted argument."""

    UNSET = "not given"


UNSET = Default.UNSET
_BETWEEN = object()  # the key while a node is opened or finished, when there is no current child
_EMPTY = ()


class TreeFunction(Protocol):
    """An `f` that sees the whole tree before any leaf is mapped, such as a mover."""

    def __fmap__(
        self, tree: Any, is_leaf: Callable[[Any], bool] | None, cache: dict[Any, Any] | None
    ) -> tuple[dict[int, Any], Callable[[Any], Any]]:
        """Maps leaves all at once: returns results by id, and a function for other leaves.

        Args:
            tree: The tree that was given to `fmap`.
            is_leaf: As given to `fmap`.
            cache: Results that are known beforehand, by id; None if ties are not kept, in which
                case the returned function maps all leaves.
        """
        ...


class TreeMap:
    """One call of `fmap` or of a relative: its arguments, and the memo while it runs.

    Args:
        f: `f(leaf, *rest_leaves)`, after the path if `with_path`.
        is_leaf, cache, prune, walk: As for `fmap`.
        with_path: Whether `f`, `is_leaf` and `walk` get the path first.
        memo: Results that are known beforehand.
        resolve: Finds the node type of a class; None for the usual one.
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
        self.resolve = plain_type_of if walk is structural_walk else resolve
        self.with_path = with_path
        self.memo: dict[Any, Any] = {} if memo is None else memo
        self.known: Mapping[int, Any] | None = None  # results for leaves only
        self.prefilled = memo is not None
        self.kept = Kept()
        self.raised: BaseException | None = None  # an error that already names the path

    def look_first(self, f: TreeFunction, tree: Any) -> None:
        """Lets `f` map the leaves of a tree all at once, before the walk."""
        cache = {} if self.cache is UNSET else self.cache
        new, other = f.__fmap__(tree, self.is_leaf, cache)
        self.f = lambda leaf: new[id(leaf)] if id(leaf) in new else other(leaf)
        if self.prune is UNSET and self.cache is UNSET:
            self.known, self.memo, self.prefilled = new, new.copy(), True

    def __call__(self, tree: Any, rest: tuple[Any, ...] = ()) -> Any:
        """Returns the mapped tree."""
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
        memo, kept = self.memo, self.kept
        if not rest and not self.prefilled:
            kept.memo = memo
        if self.walk is None:
            result = self._run(tree, _Cursor(rest, self) if rest or self.with_path else None)
        else:
            result = self._run_walk(tree, rest)
        if kept.at_end:
            new_of = (
                {i[0]: new for i, new in memo.items() if isinstance(i, tuple)} if rest else memo
            )
            for todo in kept.at_end:
                todo(lambda old: new_of.get(id(old), old))
        if kept.alike and (kept.again or self.prefilled or rest):
            replaced = {i: alike for i, (_, _, alike) in kept.alike.items()}
            if self.prefilled or not replaced.keys().isdisjoint(map(id, kept.again)):
                result = refill(result, replaced)
            for i, new in memo.items():
                memo[i] = replaced.get(id(new), new)
        return result

    def _run(self, tree: Any, cursor: _Cursor | None) -> Any:
        """Maps a tree depth first, left to right, on an explicit stack: no depth is too deep.

        An entry of the stack holds what is needed once an open node is finished: the remaining
        items of its parent, the parent's slots, the node's key there and its identity, and the
        parent's finish.
        """
        f, is_leaf, prune, resolve = self.f, self.is_leaf, self.prune, self.resolve or kind_of
        memo, results, keep = self.memo, self.known, self.kept.append
        again = None if self.prefilled else self.kept.again.append
        types: dict[type, Any] = kinds if self.resolve is None else {}
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
                        new = memo[i]
                        if prune is not UNSET:
                            slots[key] = prune
                        elif new is PENDING:
                            raise _cycle(child, stack, key, i)
                        else:
                            slots[key] = new
                            if again is not None:
                                again(new)
                        continue
                    try:
                        kind = types[type(child)]
                    except KeyError:
                        kind = resolve(type(child))
                        if types is not kinds:
                            types[type(child)] = kind
                    if kind is remembered:
                        memo[i] = slots[key] = f(child)
                    elif type(kind) is Kind and kind is not CHILDLESS:
                        slots[key] = f(child)
                    elif is_leaf is not None and is_leaf(child):
                        slots[key] = new = f(child)
                        if caching and kind is not CHILDLESS and child is not _EMPTY:
                            memo[i] = new
                    elif kind is DICT and cursor is None:  # the commonest node, in line
                        if results is not None:
                            try:  # a flat node, such as a state dict, takes no loop
                                new = {k: results[id(x)] for k, x in child.items()}
                                memo[i] = slots[key] = new
                                continue
                            except KeyError:  # it contains nodes
                                pass
                        stack.append((items, slots, key, i, finish))
                        source = child.copy()
                        keep(source)
                        memo[i] = slots[key] = slots = source.copy()
                        items = iter(source.items())
                        finish = None
                        key = _BETWEEN  # noqa: PLW2901
                        break
                    elif kind is CHILDLESS or child is _EMPTY:
                        slots[key] = child
                        if cursor is not None:
                            cursor.match(child, {})
                    else:
                        new, inner, inner_slots, inner_finish = kind.open(child, keep)
                        memo[i] = slots[key] = new
                        stack.append((items, slots, key, i, finish))
                        items = inner if cursor is None else cursor.track(child, inner)
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
            say_where(error, keys[1:])
            raise

    # A walk of the user's: it is called for every node, and calls back for the children.

    def _run_walk(self, tree: Any, rest: tuple[Any, ...]) -> Any:
        self.tree = tree
        token = walking.set(self.kept)
        try:
            return self._recurse(*(KeyPath(),) * self.with_path, tree, *rest)
        finally:
            walking.reset(token)
            self.raised = None  # its traceback refers to this object

    def _recurse(self, *args: Any) -> Any:
        """Maps a child for the user's walk, on Python's stack."""
        self.kept.append(args)
        at = int(self.with_path)
        node, others = args[at], args[at + 1 :]
        i = (id(node), *map(id, others)) if others else id(node)
        memo = self.memo
        is_open = False
        try:
            if i in memo and self.prune is not UNSET:
                return self.prune
            if i in memo and memo[i] is PENDING:
                raise _cycle(node, [], None, i)
            if i in memo:
                self.kept.again.append(memo[i])
                return memo[i]
            kind = kind_of(type(node))
            is_node = kind not in LEAVES
            has_children = is_node and kind is not CHILDLESS and node is not _EMPTY
            if is_node and not (self.is_leaf is not None and self.is_leaf(*args[: at + 1])):
                if not has_children:
                    _Cursor(others, self).match(node, {})
                    return node
                memo[i] = PENDING
                is_open = True
                assert self.walk is not None
                result = self.walk(self._recurse, *args)
            else:
                without = any(other is no_gradient for other in others)
                result = node if without else self.f(*args)
        except BaseException as error:
            if is_open:  # the user's walk may catch the error and continue
                del memo[i]
            if error is not self.raised or getattr(error, "placed", None) is False:
                say_where(error, args[0].keys if at else self._find(node))
            self.raised = error
            raise
        if self.cache is not None and (has_children or kind is LEAF):
            memo[i] = result
        elif is_open:
            del memo[i]
        return result

    def _find(self, wanted: Any) -> Sequence[Any]:
        """Finds the first path to an object, for an error message."""
        for link, value, _ in visit(self.tree, once=True):
            if value is wanted:
                return KeyPath.from_link(link).keys
        return ()


class _Cursor:
    """The position of a walk that has paths, or several trees."""

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

    def match(self, node: Any, have: Mapping[Any, Any]) -> list[dict[Any, Any]]:
        """Returns the children that the counterparts of a node have."""
        return [match_children(node, have, other) for other in self.others]

    def track(self, node: Any, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items of a node and moves the cursor to each."""
        parent = self.link
        if not self.others:
            for key, child in items:
                self.link = (parent, key)
                yield key, child
            return
        have = dict(items)
        matched = self.match(node, have)
        self.keep(matched)
        for key, child in have.items():
            self.link = (parent, key)
            self.others = tuple([children[key] for children in matched])
            yield key, child

    def identity(self, child: Any) -> tuple[int, ...]:
        """Returns the ids of a node in all trees: a tie counts where all of them are tied."""
        return (id(child), *map(id, self.others))


def _cycle(child: Any, stack: list[tuple[Any, ...]], key: Any, i: Any) -> CycleError:
    """Returns the error for a child that is still open further up the stack."""
    keys = [entry[2] for entry in stack]
    at = next((depth for depth, entry in enumerate(stack) if entry[3] == i), None)
    if at is None:
        error = CycleError(f"a walk came back to this {type(child).__name__} from inside it.")
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

    Afterwards the memo also maps each node to its new node.
    """
    return TreeMap(f, memo=memo)(tree)


# --- walks for `walk=` --------------------------------------------------------------------------


def default_walk(recurse: Callable[..., Any], node: Any, *rest: Any) -> Any:
    """Maps the children of a node and rebuilds it, as `fmap` does without `walk=`."""
    node, node_type, _, mapped = _recurse_into(recurse, node, rest)
    return node if node_type is None else node_type.rebuild(node, mapped)


def structural_walk(recurse: Callable[..., Any], node: Any, *rest: Any) -> Any:
    """Maps the children into a plain dict, list or tuple, as `fmapstructure` does."""
    _, node_type, _, mapped = _recurse_into(recurse, node, rest)
    plain = dict if node_type is None else node_type.plain
    return mapped if plain is dict else plain(mapped.values())


def collecting_walk(recurse: Callable[..., Any], node: Any, *rest: Any) -> list[Any]:
    """Collects the results of `f` in one flat list; use it with `cache=None`.

    Examples:
        >>> import fmapper
        >>> fmapper.fmap(str, {"a": [1, 2], "b": 3}, walk=fmapper.collecting_walk, cache=None)
        ['1', '2', '3']
    """
    _, _, have, results = _recurse_into(recurse, node, rest)
    out = _Collected()
    for key, mapped in results.items():
        if isinstance(mapped, _Collected):
            out.extend(mapped)
        elif not (mapped is have[key] and (mapped is None or mapped is _EMPTY)):
            out.append(mapped)
    return out


class _Collected(list[Any]):
    """The list of a collecting walk, distinguishable from any result of `f`."""


def _recurse_into(
    recurse: Callable[..., Any], node: Any, rest: tuple[Any, ...]
) -> tuple[Any, NodeType | None, dict[Any, Any], dict[Any, Any]]:
    """Returns a node (after its path, if any), its type, and its children, old and new."""
    path = node if isinstance(node, KeyPath) else None
    if path is not None:
        node, *rest = rest  # type: ignore[assignment]
    sync()
    node_type = node_type_of(node)
    have = {} if node_type is None else node_type.children(node)
    matched = [match_children(node, have, other) for other in rest]
    new = {}
    for key, child in have.items():
        place = () if path is None else (KeyPath(path, key),)
        new[key] = recurse(*place, child, *(children[key] for children in matched))
    return node, node_type, have, new
