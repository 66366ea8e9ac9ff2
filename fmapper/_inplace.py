"""Moving in place, for those who hold references to a model or to its parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from fmapper._discovery import adapter_of
from fmapper._fmap import fmap
from fmapper._functor import declaration_of
from fmapper._move import Mover
from fmapper._nodes import NodeType, node_type_of

T = TypeVar("T")
Put = Callable[[Any, Mapping[Any, Any]], object]


def move_(tree: T, mover: Mover) -> T:
    """Moves a tree in place: modules, optimizers, functors, lists and dicts stay the same objects.

    Torch parameters stay the same objects as well, as in `torch.nn.Module.to`, so whoever holds one
    sees it moved; buffers and all other arrays are replaced in what holds them. Tuples cannot
    change: one with other contents is replaced. Everything is moved before anything is changed, so
    if one leaf cannot be moved the tree is as it was; old and new arrays need memory at once. An
    optimizer keeps the parameters, but its own state only moves if it is given as well:
    `move_((model, optimizer), to_gpu)`.

    Args:
        tree: A module, an optimizer, `(model, optimizer)`, a functor ...
        mover: `to_gpu`, `to_cpu(dtype="bfloat16")` ...

    Returns:
        The tree itself, unless that cannot change: a leaf, a tuple, a frozen node of Equinox or
        flax.struct. So write `model = move_(model, mover)` where you do not know.

    Raises:
        TypeError: `mover` is no mover.
        MoveError: A leaf could not be moved, or an optimizer was given without its model. Nothing
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
        raise TypeError(f"move_ takes a mover second, such as fmapper.to_gpu, not {mover!r}.")
    new = fmap(mover, tree)
    with ExitStack() as undo:
        result: T = _Change(undo).adopt(tree, new)
        undo.pop_all()
    return result


class _Change:
    """Puts the contents of a moved tree into the old one.

    Attributes:
        undo: Takes back what was done.
    """

    def __init__(self, undo: ExitStack) -> None:
        self.undo = undo
        self.done: dict[int, tuple[Any, Any]] = {}

    def adopt(self, old: Any, new: Any) -> Any:
        """What is to be where `old` was: itself, if it can be changed. No depth is too deep."""
        stack = [self._adopting(old, new)]
        result = None
        while stack:
            try:
                pair = stack[-1].send(result)
            except StopIteration as done:
                stack.pop()
                result = done.value
            else:
                stack.append(self._adopting(*pair))
                result = None
        return result

    def _adopting(self, old: Any, new: Any) -> Generator[tuple[Any, Any], Any, Any]:
        """Asks for each child, old and new, what is to be there; returns the same of the node."""
        if new is old:
            return old
        if id(old) in self.done:
            return self.done[id(old)][1]
        node_type = node_type_of(old)
        if node_type is None:
            result = self._leaf(old, new)
            self.done[id(old)] = old, result
            return result
        put = _putter(old, node_type)
        if put is not None:
            self.done[id(old)] = old, old
        before, after = node_type.children(old), node_type.children(new)
        if put is not None:  # undone after the children, some of which may be made on the fly
            self.undo.callback(put, old, before)
        adopted = {}
        for key, child in before.items():
            adopted[key] = yield child, after[key]
        result = old
        if put is not None:
            put(old, adopted)
        elif any(adopted[key] is not child for key, child in before.items()):
            result = node_type.rebuild(old, adopted)
        self.done[id(old)] = old, result
        return result

    def _leaf(self, old: Any, new: Any) -> Any:
        adapter = adapter_of(old)
        undo = None if adapter is None else adapter.swap(old, new)
        if undo is None:
            return new
        self.undo.callback(undo)
        return old


def _putter(node: Any, node_type: NodeType) -> Put | None:
    """What gives a node other children in place; None if it cannot have any."""
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
