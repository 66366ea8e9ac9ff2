"""Moves trees in place, for callers who hold references to a model or its parameters."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from fmapper.backends.discovery import adapter_of
from fmapper.moves.mover import Mover
from fmapper.tracebacks import short_traceback
from fmapper.tree.fmap import fmap
from fmapper.tree.functor import declaration_of
from fmapper.tree.nodes import PENDING, Kind, NodeType, Opened, kind_of
from fmapper.tree.tree_map import TreeMap

T = TypeVar("T")
Put = Callable[[Any, Mapping[Any, Any]], object]
Step = Callable[[], object]


@short_traceback
def move_(tree: T, mover: Mover) -> T:
    """Moves a tree in place: modules, optimizers, functors and containers keep their identity.

    Torch parameters stay the same objects as well, as in `torch.nn.Module.to`, so whoever holds one
    sees it moved; buffers and all other arrays are replaced in their nodes. Tuples are immutable: a
    tuple with new contents is replaced. Everything is moved before anything is changed, so if one
    leaf cannot be moved the tree is unchanged; this needs memory for old and new arrays at once. An
    optimizer keeps the parameters, but its own state only moves if it is in the tree as well:
    `move_((model, optimizer), to_gpu)`.

    Args:
        tree: A module, an optimizer, `(model, optimizer)`, a functor ...
        mover: `to_gpu`, `to_cpu(dtype="bfloat16")` ...

    Returns:
        The tree itself, unless that cannot change: a leaf, a tuple, a frozen node of Equinox or
        flax.struct. If in doubt, write `model = move_(model, mover)`.

    Raises:
        TypeError: `mover` is not a mover.
        MoveError: A leaf could not be moved, or an optimizer was passed without its model. Nothing
            has changed.

    The meaning is that of `torch.nn.Module.to`,
    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html.

    Examples:
        >>> import fmapper, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> weight = model.weight
        >>> fmapper.move_(model, fmapper.to_cpu(dtype="float64")) is model
        True
        >>> model.weight is weight, weight.dtype
        (True, torch.float64)
    """
    if not isinstance(mover, Mover):
        raise TypeError(
            f"move_ takes a mover as its second argument, such as fmapper.to_gpu, not {mover!r}."
        )
    change = _Change()
    result: T = change.adopt(tree, fmap(mover, tree))
    carry_out(change.steps)
    return result


class _Change:
    """Plans how the contents of a moved tree replace those of the old one.

    Attributes:
        steps: Changes in order, each with a function that undoes it, even if it was interrupted.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Step, Step]] = []

    def adopt(self, old: Any, new: Any) -> Any:
        """Returns `old` with the contents of `new` if it can be changed in place, else `new`."""
        return TreeMap(self._leaf, resolve=self._type_of)(old, (new,))

    def _type_of(self, cls: type) -> NodeType | Kind:
        """Returns a node type whose nodes receive new children in place, if they can."""
        kind = kind_of(cls)
        if not isinstance(kind, NodeType):
            return kind

        def open(node: Any, keep: Callable[[Any], None]) -> Opened:
            before = kind.children(node)
            keep(before)
            put = putter(node, kind)

            def finish(adopted: dict[Any, Any]) -> Any:
                if put is not None:
                    self.steps.append((partial(put, node, adopted), _restorer(put, node, before)))
                elif any(adopted[key] is not child for key, child in before.items()):
                    return kind.rebuild(node, adopted)
                return node

            return PENDING if put is None else node, iter(before.items()), before.copy(), finish

        return NodeType(open, kind.items)

    def _leaf(self, old: Any, new: Any) -> Any:
        adapter = None if new is old else adapter_of(old)
        step = None if adapter is None else adapter.swap(old, new)
        if step is None:
            return new
        self.steps.append(step)
        return old


def _restorer(put: Put, node: Any, before: Mapping[Any, Any]) -> Step:
    """Returns a function that restores the children and attributes of a node."""
    state = getattr(node, "__dict__", None)
    held = None if state is None or state is node else state.copy()

    def restore() -> None:
        if held is None:
            put(node, before)
            return
        _reset(state, held)
        put(node, before)
        _reset(state, held)  # for nodes that create new lists from their children

    return restore


def _reset(state: Any, held: dict[str, Any]) -> None:
    for name in state.keys() - held.keys():
        del state[name]
    state.update(held)


def carry_out(steps: Sequence[tuple[Step, Step]]) -> None:
    """Runs the first function of each pair; if one fails, undoes them with the second ones."""

    def do_all() -> None:
        begun = 0
        try:
            for do, _ in steps:
                begun += 1
                do()
        except BaseException:
            for _, undo in reversed(steps[:begun]):
                # A node that rejected new children may reject its old ones, too; it still has them.
                with suppress(BaseException):
                    undo()
            raise

    without_interrupt(do_all)


def without_interrupt(action: Step) -> None:
    """Runs a short function and delivers Ctrl+C only after it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        action()
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        action()
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting:
        handler(*waiting[0])


def putter(node: Any, node_type: NodeType) -> Put | None:
    """Returns a function that replaces the children of a node in place; None if impossible."""
    if node_type.put is not None:
        return node_type.put
    if isinstance(node, list | dict | deque):
        return _put_items
    declaration = declaration_of(type(node))
    if declaration is None or declaration.rebuild is not None or isinstance(node, tuple):
        return None
    return _put_attributes


def _put_items(node: Any, children: Mapping[Any, Any]) -> None:
    for key, child in children.items():
        node[key] = child


def _put_attributes(node: Any, children: Mapping[Any, Any]) -> None:
    for name, child in children.items():
        object.__setattr__(node, name, child)
