"""Going through a tree without rebuilding it, and the words for where in it something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fmapper.errors import CycleError, FmapperError
from fmapper.tree import nodes
from fmapper.tree.keypath import KeyPath, Link, format_keys, format_link
from fmapper.tree.nodes import LEAVES, WITHOUT_IDENTITY, Item, Kind, NodeType


def visit(
    tree: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    once: bool = False,
    known: Mapping[Any, Any] | None = None,
) -> Iterator[tuple[Link, Any, NodeType | Kind | None]]:
    """Yields (link, node or leaf, its node type or None for a leaf), depth first, parents first.

    Args:
        tree: Anything.
        is_leaf: Nodes for which it is true are leaves too.
        once: Each object at its first place only; else at every place, and cycles are an error.
        known: With `once`: ids that count as seen already.
    """
    seen: dict[int, Any] = {}
    open_at: dict[int, Link] = {}
    known = known or {}
    stack: list[tuple[Link, Iterator[Item], Any]] = [(None, iter(((None, tree),)), None)]
    while stack:
        parent, items, node = stack[-1]
        for key, child in items:
            link = (parent, key) if len(stack) > 1 else None
            kind = nodes.kind_of(type(child))
            i = id(child)
            if once and kind not in WITHOUT_IDENTITY:
                if i in seen or i in known:
                    continue
                seen[i] = child
            if kind in LEAVES or (is_leaf is not None and is_leaf(child)):
                yield link, child, None
                continue
            yield link, child, kind
            if isinstance(kind, NodeType):
                if not once:
                    if i in open_at:
                        raise cycle_error(child, open_at[i], link)
                    open_at[i] = link
                try:
                    inner = iter(kind.items(child))
                except FmapperError as error:
                    say_where(error, KeyPath.from_link(link).keys)
                    raise
                stack.append((link, inner, child))
                break
        else:
            stack.pop()
            open_at.pop(id(node), None)


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
