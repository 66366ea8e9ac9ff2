"""Iterates over trees without rebuilding them; adds paths to errors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fmapper.errors import CycleError, FmapperError, StructureMismatchError
from fmapper.tree.keypath import KeyPath, Link, format_keys, format_link
from fmapper.tree.nodes import (
    ATOM,
    CHILDLESS,
    INTERNED,
    LEAVES,
    Item,
    Kind,
    NodeType,
    kind_of,
    kinds,
    no_gradient,
)

Enter = Callable[[Any, "NodeType | Kind"], "Iterable[Item] | None"]
Down = Callable[[Any, Any, Any, Any], Any]


def walk(
    tree: Any,
    *,
    once: bool = True,
    is_leaf: Callable[[Any], bool] | None = None,
    state: Any = None,
    down: Down | None = None,
    enter: Enter | None = None,
    skip: Container[int] = (),
) -> Iterator[tuple[Link, Any, NodeType | Kind | None, Any]]:
    """Yields (link, node or leaf, its kind or None for a leaf, state), parents first, depth first.

    Args:
        tree: Anything.
        once: Yield each object once for each state in which it is reached, and follow no cycles;
            otherwise yield it at every place, and raise for cycles.
        is_leaf: Nodes for which it is true are leaves too.
        state: The state of the tree itself.
        down: `down(state, node, key, child)` returns the state of a child, which is hashable, from
            that of its node; None if all have the same state.
        enter: `enter(value, kind)` returns the (key, child) pairs of an object to enter, None for a
            leaf. By default nodes are entered.
        skip: With `once`: ids that count as seen already.
    """
    look, look_up = kinds.get, kind_of
    seen: dict[Any, Any] = {}
    above: dict[int, Link] = {}
    stack: list[tuple[Any, ...]] = []
    link: Link
    parent: Link = None
    node: Any = None
    items: Iterator[Item] = iter(((0, tree),))
    while True:
        for key, child in items:
            link = (parent, key) if stack else None
            inner = state if down is None or not stack else down(state, node, key, child)
            kind = look(type(child)) or look_up(type(child))
            i = id(child)
            if once and kind is not ATOM and kind is not INTERNED:
                identity = i if down is None else (i, inner)
                if identity in seen or i in above or i in skip:
                    continue
                seen[identity] = child
            below: Iterable[Item] | None = None
            try:
                if enter is not None:
                    below = enter(child, kind)
                elif kind not in LEAVES and not (is_leaf is not None and is_leaf(child)):
                    below = kind.items(child) if isinstance(kind, NodeType) else ()
            except FmapperError as error:
                say_where(error, KeyPath.from_link(link).keys)
                raise
            if below is None:
                yield link, child, None, inner
                continue
            yield link, child, kind, inner
            if below != ():
                if i in above:
                    raise cycle_error(child, above[i], link)
                above[i] = link
                stack.append((parent, node, state, items))
                parent, node, state, items = link, child, inner, iter(below)
                break
        else:
            if not stack:
                return
            above.pop(id(node), None)
            parent, node, state, items = stack.pop()


def visit(
    tree: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    once: bool = False,
    skip: Container[int] = (),
) -> Iterator[tuple[Link, Any, NodeType | Kind | None]]:
    """Yields like `walk`, without the state, and by default at every place."""
    for link, value, kind, _ in walk(tree, once=once, is_leaf=is_leaf, skip=skip):
        yield link, value, kind


# --- errors -------------------------------------------------------------------------------------


def say_where(error: BaseException, keys: Sequence[object]) -> None:
    """Adds the path to an error: to the message of an fmapper error, as a note to others."""
    if isinstance(error, FmapperError):
        placed, error.placed = error.placed, None
        if placed:
            return
        if placed is False:
            error.args = (f"{format_keys(keys)}: {error.args[0]}", *error.args[1:])
            return
    if isinstance(error, Exception):
        error.add_note(f"at {format_keys(keys)}")


def cycle_error(child: Any, first: Link, again: Link) -> CycleError:
    """Returns the error for a node that contains itself."""
    return CycleError(
        f"{format_link(again)}: this is the {type(child).__name__} at {format_link(first)} again. "
        "fmap follows a cycle only through nodes that exist before their children do (lists, "
        "dicts, functors with the default rebuild), or where prune= gives a value to put there; a "
        "list of all leaves or a state of a cyclic tree would be infinite. Break the cycle."
    )


def match_children(node: Any, have: Mapping[Any, Any], other: Any) -> dict[Any, Any]:
    """Returns the children of `other`, which must have the keys that `node` has.

    Raises:
        StructureMismatchError: The keys differ; the walk adds the path to the error.
    """
    if node is no_gradient:  # whatever the other trees have there
        return {}
    kind = kind_of(type(other))
    if isinstance(kind, NodeType):
        children = kind.children(other)
        if children.keys() == have.keys():
            return children
        problem = _differing_keys(node, have, other, children)
    elif kind is CHILDLESS and not have:
        return {}
    else:
        what = "None" if kind is CHILDLESS else f"a leaf of type {type(other).__name__}"
        name = type(node).__name__
        problem = f"the first tree has {name} with {_count(have)} here, a later one has {what}."
    error = StructureMismatchError(problem)
    error.placed = False
    raise error


def _differing_keys(
    node: Any, have: Mapping[Any, Any], other: Any, children: Mapping[Any, Any]
) -> str:
    mine, theirs = type(node).__name__, type(other).__name__
    if all(list(keys) == list(range(len(keys))) for keys in (have, children)):
        return f"{mine} has {_count(have)}, {theirs} in a later tree has {_count(children)}."
    missing = [repr(key) for key in have if key not in children]
    extra = [repr(key) for key in children if key not in have]
    parts = [f"lacks {', '.join(missing)}"] * bool(missing)
    parts += [f"has {', '.join(extra)} besides"] * bool(extra)
    names = ", ".join(map(repr, have)) or "no children"
    return f"{mine} has {names}; {theirs} in a later tree {' and '.join(parts)}."


def _count(keys: Mapping[Any, Any]) -> str:
    return f"{len(keys)} {'child' if len(keys) == 1 else 'children'}"
