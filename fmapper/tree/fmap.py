"""The one walk, and its short relatives."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol, TypeGuard, cast

from fmapper.errors import CycleError, FmapperError, StructureMismatchError
from fmapper.tree import nodes
from fmapper.tree.functor import has_class_attribute
from fmapper.tree.keypath import KeyPath, Link, format_link
from fmapper.tree.no_gradient import no_gradient
from fmapper.tree.nodes import (
    CHILDLESS,
    FITTED,
    LEAF,
    LEAVES,
    PENDING,
    WITHOUT_IDENTITY,
    Fitting,
    Item,
    Kept,
    Kind,
    NodeType,
    node_type_of,
    open_childless,
    open_dict,
    opener_of,
    plain_opener_of,
    sync,
    unplaced,
)
from fmapper.tree.walk import class_of, cycle_error, placed, say_where, visit

Walk = Callable[..., Any]


class _Default(enum.Enum):
    UNSET = "not given"


UNSET = _Default.UNSET


def fmap(
    f: Callable[..., Any] | TreeFunction,
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    cache: dict[Any, Any] | _Default | None = UNSET,
    prune: Any = UNSET,
    walk: Walk | None = None,
) -> Any:
    """Applies `f` to every leaf of a tree and rebuilds the tree around the results.

    The input is never changed. The same object at two places is mapped once and the result is the
    same object at both places; cycles through nodes with the default rebuild are kept. Numbers,
    strings, None and `()` have no identity: `f` gets them at every place.

    Args:
        f: `f(leaf, *rest_leaves) -> new leaf`, or a mover.
        tree: Anything. Its structure is the structure of the result.
        rest: Trees of the same structure, possibly of other classes or plain dicts with the same
            keys. Where `tree` has a leaf they may have anything; `f` gets it. Where one is a
            gradient that has `no_gradient` there, the leaf stays as it is.
        is_leaf: `is_leaf(node) -> bool`: nodes for which it is true are leaves too.
        cache: None switches the memo off, so that ties are not kept. A dict of your own is used
            as the memo, so that ties are kept across calls: `cache[id(x)]` is the result for x, and
            `cache[id(cache)]` a list of everything that must stay alive for the ids to be valid,
            as in `copy.deepcopy`.
        prune: A value to put at every later occurrence of a leaf or node.
        walk: `walk(recurse, node, *rest_nodes) -> result`, called for every node instead of the
            default, which maps all children with `recurse(child, *rest_children)` and rebuilds.

    Returns:
        A new tree of the same structure.

    Raises:
        StructureMismatchError: A tree in `rest` differs from `tree`; the message names the path.
        CycleError: A cycle runs through a tuple or a node with a rebuild of its own.
        RebuildError: A node could not be rebuilt.
        Exception: Whatever `f` raises, with a note that says at which path.

    The behaviour follows Functors.jl, https://fluxml.ai/Functors.jl.

    Examples:
        >>> import fmapper
        >>> w = [1, 2]
        >>> new = fmapper.fmap(lambda x: 10 * x, {"encoder": w, "decoder": w, "name": None})
        >>> new, new["encoder"] is new["decoder"]
        ({'encoder': [10, 20], 'decoder': [10, 20], 'name': None}, True)
        >>> fmapper.fmap(lambda p, g: p - g, {"w": [3, 4]}, {"w": (1, 1)})
        {'w': [2, 3]}
    """
    sync()
    options = _Map(cast(Any, f), is_leaf, cache, prune, walk)
    if type(f) is not FunctionType and takes_trees(f):
        if rest:
            raise TypeError(f"{f!r} takes one tree, but {1 + len(rest)} were given.")
        new, other = f.__fmap__(tree, is_leaf, {} if cache is UNSET else cache)
        options.f = lambda leaf: new[id(leaf)] if id(leaf) in new else other(leaf)
        if prune is UNSET and cache is UNSET:
            options.known, options.memo = new, new.copy()
    elif takes_trees(tree):
        raise TypeError(f"fmap takes the function first: fmap({tree!r}, tree).")
    return options(tree, rest)


class TreeFunction(Protocol):
    """An `f` that wants to see the tree before it maps a leaf: movers are of this kind."""

    def __fmap__(
        self, tree: Any, is_leaf: Callable[[Any], bool] | None, cache: dict[Any, Any] | None
    ) -> tuple[dict[int, Any], Callable[[Any], Any]]:
        """Returns what the leaves of the tree become, by id, and the function for any other leaf.

        Args:
            tree: The tree that was given to `fmap`.
            is_leaf: As given to `fmap`.
            cache: What is known beforehand, by id; None if each place is mapped for itself, and the
                function is to map all leaves.
        """
        ...


def takes_trees(f: object) -> TypeGuard[TreeFunction]:
    """Whether a function for `fmap` has the hook `__fmap__`; an `nnx.Rngs` has every attribute."""
    return has_class_attribute(type(f), "__fmap__")


def fmap_with_path(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[KeyPath, Any], bool] | None = None,
    cache: dict[Any, Any] | _Default | None = UNSET,
    prune: Any = UNSET,
    walk: Walk | None = None,
) -> Any:
    """Like `fmap`, with `f(path, leaf, *rest_leaves)` and `is_leaf(path, node)`.

    A tied leaf is mapped once, with its first path. A walk of your own is called as
    `walk(recurse, path, node, *rest)` and recurses with `recurse(path, child, *rest)`.

    Examples:
        >>> import fmapper
        >>> fmapper.fmap_with_path(lambda path, x: f"{path}={x}", {"a": [1, 2], "b": 3})
        {'a': ['a[0]=1', 'a[1]=2'], 'b': 'b=3'}
    """
    sync()
    return _Map(f, is_leaf, cache, prune, walk, with_path=True)(tree, rest)


def fmapstructure(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    cache: dict[Any, Any] | _Default | None = UNSET,
    prune: Any = UNSET,
) -> Any:
    """Like `fmap`, with plain dicts, lists and tuples in place of user classes.

    Examples:
        >>> import collections, fmapper
        >>> Point = collections.namedtuple("Point", "x y")
        >>> fmapper.fmapstructure(lambda x: -x, Point(1, [2, 3]))
        {'x': -1, 'y': [-2, -3]}
    """
    sync()
    return _Map(f, is_leaf, cache, prune, structural_walk)(tree, rest)


def fmapstructure_with_path(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[KeyPath, Any], bool] | None = None,
    cache: dict[Any, Any] | _Default | None = UNSET,
    prune: Any = UNSET,
) -> Any:
    """`fmapstructure` with `f(path, leaf, *rest_leaves)`."""
    sync()
    return _Map(f, is_leaf, cache, prune, structural_walk, with_path=True)(tree, rest)


def fleaves(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a tree, depth first, one per occurrence.

    Raises:
        CycleError: The tree has a cycle, so the list would have no end.

    Examples:
        >>> import fmapper
        >>> fmapper.fleaves({"b": [1, 2], "a": (3, None)})
        [1, 2, 3]
    """
    sync()
    return [value for _, value, node_type in visit(tree, is_leaf=is_leaf) if node_type is None]


def fcollect(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """All nodes and leaves of a tree, depth first, parents before children, each object once.

    Numbers and strings have no identity and are listed at every place. Cycles are no obstacle.

    Examples:
        >>> import fmapper
        >>> inner = [1, 2]
        >>> fmapper.fcollect({"a": inner, "b": inner})
        [{'a': [1, 2], 'b': [1, 2]}, [1, 2], 1, 2]
    """
    sync()
    return [value for _, value, _ in visit(tree, is_leaf=is_leaf, once=True)]


def children(node: Any) -> dict[Any, Any]:
    """The children of a node by key, in order; empty for a leaf.

    Examples:
        >>> import fmapper
        >>> fmapper.children([5, 6])
        {0: 5, 1: 6}
    """
    sync()
    node_type = node_type_of(node)
    return {} if node_type is None else node_type.children(node)


def rebuild(node: Any, new_children: Mapping[Any, Any] | Sequence[Any]) -> Any:
    """A new node like `node` with other children; `node` is not changed.

    Args:
        node: A node; a leaf comes back as it is.
        new_children: A mapping with the keys of `children(node)`, or a sequence in their order.

    Raises:
        StructureMismatchError: The keys, or the number of children, differ.

    Examples:
        >>> import fmapper
        >>> fmapper.rebuild({"w": 1, "b": 2}, {"w": 10, "b": 20})
        {'w': 10, 'b': 20}
    """
    sync()
    node_type = node_type_of(node)
    have = {} if node_type is None else node_type.children(node)
    if isinstance(new_children, Mapping):
        given = dict(new_children)
    elif len(new_children) == len(have):
        given = dict(zip(have, new_children, strict=True))
    else:
        raise StructureMismatchError(
            f"rebuild: {class_of(node)} has {len(have)} children, {len(new_children)} were given."
        )
    if given.keys() != have.keys():
        raise StructureMismatchError(
            f"rebuild: {class_of(node)} has the children {', '.join(map(repr, have)) or 'none'}; "
            f"given were {', '.join(map(repr, given)) or 'none'}."
        )
    return node if node_type is None else node_type.rebuild(node, given)


def is_leaf(x: Any) -> bool:
    """Whether a walk gives `x` to `f`: it is not a node. None and `()` are nodes without children.

    Examples:
        >>> import fmapper
        >>> [fmapper.is_leaf(x) for x in (1, "a", [], None)]
        [True, True, False, False]
    """
    sync()
    return nodes.kind_of(type(x)) in LEAVES


# --- walks --------------------------------------------------------------------------------------


def default_walk(recurse: Callable[..., Any], node: Any, *rest: Any) -> Any:
    """The walk of `fmap`: maps the children of a node and rebuilds the node from the results."""
    node, mapped = _recursed(recurse, node, rest)
    return rebuild(node, mapped)


def structural_walk(recurse: Callable[..., Any], node: Any, *rest: Any) -> Any:
    """The walk of `fmapstructure`: maps the children into a plain dict, list or tuple."""
    node, mapped = _recursed(recurse, node, rest)
    node_type = node_type_of(node)
    plain = dict if node_type is None else node_type.plain
    return mapped if plain is dict else plain(mapped.values())


def collecting_walk(recurse: Callable[..., Any], node: Any, *rest: Any) -> list[Any]:
    """A walk that makes one flat list of what `f` returns; use it with `cache=None`.

    Examples:
        >>> import fmapper
        >>> fmapper.fmap(str, {"a": [1, 2], "b": 3}, walk=fmapper.collecting_walk, cache=None)
        ['1', '2', '3']
    """
    node, results = _recursed(recurse, node, rest)
    have = children(node)
    out = _Collected()
    for key, mapped in results.items():
        if isinstance(mapped, _Collected):
            out.extend(mapped)
        elif not (mapped is have[key] and (mapped is None or mapped is _EMPTY)):
            out.append(mapped)
    return out


class _Collected(list[Any]):
    """The list that a collecting walk makes, which is never what `f` returned."""


def _recursed(
    recurse: Callable[..., Any], node: Any, rest: tuple[Any, ...]
) -> tuple[Any, dict[Any, Any]]:
    """The node, and its children mapped; a walk with paths has the path before the node."""
    if isinstance(node, KeyPath):
        path, (node, *others) = node, rest
        have = children(node)
        matched = [_match(node, have, other) for other in others]
        return node, {
            key: recurse(KeyPath(path, key), child, *(m[key] for m in matched))
            for key, child in have.items()
        }
    have = children(node)
    matched = [_match(node, have, other) for other in rest]
    return node, {key: recurse(child, *(m[key] for m in matched)) for key, child in have.items()}


# --- the engine ---------------------------------------------------------------------------------


class _Cursor:
    """Where a walk with paths or several trees is: moved by `tracked`, read by `f`."""

    __slots__ = ("keep", "link", "others")

    def __init__(self, rest: tuple[Any, ...], keep: Callable[[Any], None]) -> None:
        self.link: Link = None
        self.others = rest
        self.keep = keep

    def tracked(self, node: Any, items: Iterable[Item]) -> Iterator[Item]:
        """The items of a node; the cursor stands at each while it is looked at."""
        parent = self.link
        if not self.others:
            for key, child in items:
                self.link = (parent, key)
                yield key, child
            return
        have = dict(items)
        matched = [_match(node, have, other, parent) for other in self.others]
        self.keep(matched)
        for key, child in have.items():
            self.link = (parent, key)
            self.others = tuple(m[key] for m in matched)
            yield key, child

    def identity(self, child: Any) -> tuple[int, ...]:
        """The identity of what all trees have here: a tie is one only where all are tied."""
        return (id(child), *map(id, self.others))


_BETWEEN = object()  # the key while no child is looked at: a node is opened or closed
_EMPTY = ()


def _run(
    f: Callable[[Any], Any],
    tree: Any,
    *,
    openers: dict[type, Any],
    resolve: Callable[[type], Any],
    memo: dict[Any, Any],
    keep: Callable[[Any], None],
    is_leaf: Callable[[Any], bool] | None,
    caching: bool,
    prune: Any,
    cursor: _Cursor | None,
    known: Mapping[int, Any] | None = None,
) -> Any:
    """Maps a tree depth first, left to right, on a stack of its own: no depth is too deep.

    An entry of the stack is what an open node will need again: the items that its parent has left,
    where the parent's results go, its own key there and its identity, how the parent is finished.
    """
    ident: Callable[[Any], Any] = id
    if cursor is not None and cursor.others:
        ident = cursor.identity
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
                        raise placed(_cycle(child, stack, key, i))
                    else:
                        slots[key] = memo[i]
                    continue
                try:
                    open = openers[type(child)]
                except KeyError:
                    open = resolve(type(child))
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
                            memo[i] = slots[key] = {k: known[id(x)] for k, x in child.items()}
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
                    if cursor is not None:
                        inner = cursor.tracked(child, inner)
                    if new is CHILDLESS:
                        slots[key] = child
                        for _ in inner:  # several trees: they must have no children here either
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
        say_where(error, keys[1:])
        raise


@dataclasses.dataclass(slots=True)
class _Map:
    """One call of `fmap` or of a relative: its arguments, and the memo while it runs."""

    f: Callable[..., Any]
    is_leaf: Callable[..., bool] | None
    cache: dict[Any, Any] | _Default | None
    prune: Any
    walk: Walk | None
    with_path: bool = False
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict)  # may know results beforehand
    known: Mapping[int, Any] | None = None  # results for leaves alone, of a batch
    kept: Kept = dataclasses.field(init=False)
    tree: Any = None

    def __call__(self, tree: Any, rest: tuple[Any, ...] = ()) -> Any:
        """The mapped tree."""
        if self.prune is not UNSET and self.cache is None:
            raise ValueError("prune= needs the memo: leave cache=None out.")
        self.tree = tree
        self.kept = Kept()
        if isinstance(self.cache, dict):
            return self._with_users_cache(self.cache, rest)
        return self._run(rest)

    def _with_users_cache(self, cache: dict[Any, Any], rest: tuple[Any, ...]) -> Any:
        """Maps with a memo that outlives the call; if the map fails, it is left as it was."""
        entries = len(cache)
        kept = cache.setdefault(id(cache), [])
        self.memo = cache
        self.kept.append((self.tree, rest))
        try:
            result = self._run(rest)
        except BaseException:
            for added in list(cache)[entries:]:
                del cache[added]
            raise
        kept.extend(self.kept)
        return result

    def _run(self, rest: tuple[Any, ...]) -> Any:
        if self.walk not in (None, default_walk, structural_walk):
            token = nodes.walking.set(self.kept)
            try:
                result = self._recurse(*([KeyPath()] * self.with_path), self.tree, *rest)
            finally:
                nodes.walking.reset(token)
            return self._completed(result, several=bool(rest))
        cursor = _Cursor(rest, self.kept.append) if rest or self.with_path else None
        plain = self.walk is structural_walk
        result = _run(
            self.f if cursor is None else self._leaf_call(cursor),
            self.tree,
            openers=nodes.plain_openers if plain else nodes.openers,
            resolve=plain_opener_of if plain else opener_of,
            memo=self.memo,
            keep=self.kept.append,
            is_leaf=self.is_leaf if cursor is None else self._node_test(cursor),
            caching=self.cache is not None,
            prune=self.prune,
            cursor=cursor,
            known=self.known,
        )
        return self._completed(result, several=bool(rest))

    def _completed(self, result: Any, *, several: bool) -> Any:
        """Does what could only be done when all nodes were there."""
        if self.kept.at_end:
            memo = self.memo
            if several:
                memo = {i[0]: new for i, new in memo.items() if isinstance(i, tuple)}
            for todo in self.kept.at_end:
                todo(lambda old: memo.get(id(old), old))
        if self.kept.refitted:
            fitted = {id(before): after for before, after in self.kept.refitted}
            again = _Map(lambda leaf: leaf, None, UNSET, UNSET, None, memo=fitted)
            result = again(result)
            for i, new in self.memo.items():
                self.memo[i] = again.memo.get(id(new), new)
        return result

    def _leaf_call(self, cursor: _Cursor) -> Callable[[Any], Any]:
        f = self.f
        with_path = self.with_path

        def call(leaf: Any) -> Any:
            others = cursor.others
            for other in others:
                if other is no_gradient:
                    return leaf
            if with_path:
                return f(KeyPath.from_link(cursor.link), leaf, *others)
            return f(leaf, *others)

        return call

    def _node_test(self, cursor: _Cursor) -> Callable[[Any], bool] | None:
        is_leaf = self.is_leaf
        if is_leaf is None or not self.with_path:
            return is_leaf
        return lambda node: is_leaf(KeyPath.from_link(cursor.link), node)

    # A walk of the user's recurses as deep as it does, so this part recurses with it.

    def _recurse(self, *args: Any) -> Any:
        assert self.walk is not None
        path = args[:1] if self.with_path else ()
        node, *rest = args[len(path) :]
        i = (id(node), *map(id, rest)) if rest else id(node)
        if i in self.memo:
            if self.prune is not UNSET:
                return self.prune
            if self.memo[i] is PENDING:
                raise CycleError(
                    f"{format_link(self._find(node))}: a walk came back to this {class_of(node)} "
                    "from inside it."
                )
            return self.memo[i]
        kind = nodes.kind_of(type(node))
        is_node = isinstance(kind, NodeType) or kind is CHILDLESS
        if not is_node or (self.is_leaf is not None and self.is_leaf(*path, node)):
            try:
                left_alone = any(other is no_gradient for other in rest)
                result = node if left_alone else self.f(*args)
            except Exception as error:
                keys = path[0].keys if path else KeyPath.from_link(self._find(node)).keys
                say_where(error, keys)
                raise
        elif kind is CHILDLESS or node is _EMPTY:
            for other in rest:
                _match(node, {}, other, self._find(node))
            return node
        else:
            self.memo[i] = PENDING
            try:
                result = self.walk(self._recurse, *args)
            except FmapperError as error:
                if error.placed is False:
                    say_where(error, KeyPath.from_link(self._find(node)).keys)
                raise
            finally:
                del self.memo[i]
        if self.cache is not None and not (
            kind in WITHOUT_IDENTITY or kind is CHILDLESS or node is _EMPTY
        ):
            self.kept.append(args)
            self.memo[i] = result
        return result

    def _find(self, wanted: Any) -> Link:
        """The first path to an object; looked for only when there is something to say."""
        for link, value, _ in visit(self.tree, once=True):
            if value is wanted:
                return link
        return None


# --- what goes wrong ----------------------------------------------------------------------------


def _cycle(child: Any, stack: list[tuple[Any, ...]], key: Any, i: Any) -> CycleError:
    """The error for a child that is still open further up the stack."""
    keys = [entry[2] for entry in stack]
    at = next(depth for depth, entry in enumerate(stack) if entry[3] == i)
    first: Link = None
    for step in keys[1 : at + 1]:
        first = (first, step)
    again = first
    for step in [*keys[at + 1 :], key]:
        again = (again, step)
    return cycle_error(child, first, again)


def _match(
    node: Any, have: Iterable[Any], other: Any, link: Link | _Default = UNSET
) -> dict[Any, Any]:
    """The children of `other`, which must have the keys that `node` has."""
    if node is no_gradient:  # whatever the others have there
        return {}
    kind = nodes.kind_of(type(other))
    problem = None
    found: dict[Any, Any] = {}
    if isinstance(kind, NodeType):
        found = kind.children(other)
        if found.keys() != dict.fromkeys(have).keys():
            problem = _differing_keys(node, dict.fromkeys(have), other, found)
    elif kind is not CHILDLESS:
        problem = (
            f"the first tree has {class_of(node)} with {_count(have)} here, "
            f"a later one has a leaf of type {type(other).__name__}."
        )
    elif any(True for _ in have):
        problem = (
            f"the first tree has {class_of(node)} with {_count(have)} here, a later one has None."
        )
    if problem is not None:
        if link is UNSET:
            raise unplaced(StructureMismatchError(problem))
        raise placed(StructureMismatchError(f"{format_link(link)}: {problem}"))
    return found


def _differing_keys(
    node: Any, have: Mapping[Any, Any], other: Any, found: Mapping[Any, Any]
) -> str:
    if all(list(keys) == list(range(len(keys))) for keys in (have, found)):
        return (
            f"{class_of(node)} has {_count(have)}, "
            f"{class_of(other)} in a later tree has {_count(found)}."
        )
    missing = [repr(key) for key in have if key not in found]
    extra = [repr(key) for key in found if key not in have]
    parts = [f"lacks {', '.join(missing)}"] * bool(missing)
    parts += [f"has {', '.join(extra)} besides"] * bool(extra)
    names = ", ".join(map(repr, have)) or "no children"
    return f"{class_of(node)} has {names}; {class_of(other)} in a later tree {' and '.join(parts)}."


def _count(keys: Iterable[Any]) -> str:
    n = sum(1 for _ in keys)
    return f"{n} {'child' if n == 1 else 'children'}"
