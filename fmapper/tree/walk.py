"""Going through a tree without rebuilding it, and the words for where in it something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from fmapper.errors import CycleError, FmapperError
from fmapper.tree import nodes
from fmapper.tree.keypath import KeyPath, Link, format_keys, format_link
from fmapper.tree.nodes import LEAVES, WITHOUT_IDENTITY, Item, Kind, NodeType

Enter = Callable[[Any, "NodeType | Kind"], "Iterable[Item] | None"]
Down = Callable[[Any, Any, Any, Any], Any]


def enter_node(value: Any, kind: NodeType | Kind) -> Iterable[Item] | None:
    """Returns the (key, child) pairs of a node; None for a leaf."""
    if isinstance(kind, NodeType):
        return kind.items(value)
    return None if kind in LEAVES else ()


def walk(
    tree: Any,
    *,
    once: bool = True,
    state: Any = None,
    down: Down | None = None,
    enter: Enter = enter_node,
    known: Container[int] = (),
) -> Iterator[tuple[Link, Any, NodeType | Kind | None, Any]]:
    """Yields (link, node or leaf, its kind or None for a leaf, state), parents first, depth first.

    Args:
        tree: Anything.
        once: Each object once for each state in which it is reached, and no way back up; else
            every place, and cycles are an error.
        state: That of the tree.
        down: `down(state, node, key, child)` gives the state of a child, something hashable, from
            that of its node; None where all have the same.
        enter: `enter(value, kind)` gives the (key, child) pairs of what is gone into, None for a
            leaf.
        known: With `once`: ids that count as seen already.
    """
    seen: dict[tuple[int, Any], Any] = {}
    above: dict[int, Link] = {}
    stack: list[tuple[Link, Iterator[Item], Any, Any]] = [(None, iter(((0, tree),)), None, state)]
    while stack:
        parent, items, node, outer = stack[-1]
        for key, child in items:
            is_root = len(stack) == 1
            link = None if is_root else (parent, key)
            inner = outer if down is None or is_root else down(outer, node, key, child)
            kind = nodes.kind_of(type(child))
            i = id(child)
            if once and kind not in WITHOUT_IDENTITY:
                if (i, inner) in seen or i in above or i in known:
                    continue
                seen[i, inner] = child
            try:
                below = enter(child, kind)
            except FmapperError as error:
                say_where(error, KeyPath.from_link(link).keys)
                raise
            yield link, child, None if below is None else kind, inner
            if below:
                if i in above:
                    raise cycle_error(child, above[i], link)
                above[i] = link
                stack.append((link, iter(below), child, inner))
                break
        else:
            stack.pop()
            above.pop(id(node), None)


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

    def enter(value: Any, kind: NodeType | Kind) -> Iterable[Item] | None:
        if kind in LEAVES or (is_leaf is not None and is_leaf(value)):
            return None
        return kind.items(value) if isinstance(kind, NodeType) else ()

    return (place[:3] for place in walk(tree, once=once, enter=enter, known=known))


# --- what goes wrong ----------------------------------------------------------------------------


def placed(error: FmapperError) -> FmapperError:
    """Marks an error whose message has the key path already."""
    error.placed = True
    return error


def say_where(error: BaseException, keys: Sequence[object]) -> None:
    """Completes the message of our own errors with the path, and gives others a note with it."""
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
