"""Going through a tree without rebuilding it, and the words for where in it something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from fmapper.errors import CycleError, FmapperError
from fmapper.tracebacks import short_traceback
from fmapper.tree import nodes
from fmapper.tree.keypath import KeyPath, Link, format_keys, format_link
from fmapper.tree.node_type import ATOM, INTERNED, LEAVES, Item, Kind, NodeType

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
    known: Container[int] = (),
) -> Iterator[tuple[Link, Any, NodeType | Kind | None, Any]]:
    """Yields (link, node or leaf, its kind or None for a leaf, state), parents first, depth first.

    Args:
        tree: Anything.
        once: Each object once for each state in which it is reached, and no way back up; else
            every place, and cycles are an error.
        is_leaf: Nodes for which it is true are leaves too.
        state: That of the tree.
        down: `down(state, node, key, child)` gives the state of a child, something hashable, from
            that of its node; None where all have the same.
        enter: `enter(value, kind)` gives the (key, child) pairs of what is gone into, None for a
            leaf; None for those of nodes.
        known: With `once`: ids that count as seen already.
    """
    kinds, kind_of = nodes.kinds, nodes.kind_of
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
            kind = kinds.get(type(child)) or kind_of(type(child))
            i = id(child)
            if once and kind is not ATOM and kind is not INTERNED:
                identity = i if down is None else (i, inner)
                if identity in seen or i in above or i in known:
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
    known: Container[int] = (),
) -> Iterator[tuple[Link, Any, NodeType | Kind | None]]:
    """Yields (link, node or leaf, its node type or None for a leaf), depth first, parents first.

    Args:
        tree: Anything.
        is_leaf: Nodes for which it is true are leaves too.
        once: Each object at its first place only; else at every place, and cycles are an error.
        known: With `once`: ids that count as seen already.
    """
    for link, value, kind, _ in walk(tree, once=once, is_leaf=is_leaf, known=known):
        yield link, value, kind


@short_traceback
def fleaves(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Returns the leaves of a tree, depth first, one per occurrence.

    Raises:
        CycleError: The tree has a cycle, so the list would have no end.

    Examples:
        >>> import fmapper
        >>> fmapper.fleaves({"b": [1, 2], "a": (3, None)})
        [1, 2, 3]
    """
    nodes.sync()
    return [value for _, value, node_type in visit(tree, is_leaf=is_leaf) if node_type is None]


@short_traceback
def fcollect(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Collects all nodes and leaves of a tree, depth first, parents first, each object once.

    Numbers and strings have no identity and are listed at every place. Cycles are followed once.

    Examples:
        >>> import fmapper
        >>> inner = [1, 2]
        >>> fmapper.fcollect({"a": inner, "b": inner})
        [{'a': [1, 2], 'b': [1, 2]}, [1, 2], 1, 2]
    """
    nodes.sync()
    return [value for _, value, _ in visit(tree, is_leaf=is_leaf, once=True)]


# --- what goes wrong ----------------------------------------------------------------------------


def say_where(error: BaseException, keys: Sequence[object]) -> None:
    """Adds the path to an error: to the message of our own, as a note to others."""
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
        f"{format_link(again)}: this is the {class_of(child)} at {format_link(first)} again. "
        "fmap follows a cycle only through nodes that exist before their children do (lists, "
        "dicts, functors with the default rebuild), or with prune= a value to put there; a list "
        "of all leaves or a state of a cyclic tree would have no end. Break the cycle."
    )


def class_of(node: Any) -> str:
    """Returns the name of the class of a node."""
    return type(node).__name__
