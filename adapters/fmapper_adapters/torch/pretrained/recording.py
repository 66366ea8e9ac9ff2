"""Records operations on tensors without memory, which may only move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmapper import CheckpointError
from fmapper_adapters.torch._private import TorchDispatchMode

_aten = torch.ops.aten
_SAME = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.contiguous.default,
    _aten.lift_fresh.default,
}
_SHAPES = {
    _aten.view.default,
    _aten.reshape.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.squeeze.default,
    _aten.unsqueeze.default,
    _aten._unsafe_view.default,
}


@dataclass(eq=False)
class Node:
    """An array, and how it is made from others.

    Attributes:
        kind: `leaf`, `reshape`, `transpose`, `concatenate`, `stack`, or `part` of another.
        parents: The arrays it is made from.
        value: The new axes, the axis, or the number of the part.
        shape: Its shape.
        name: The name of a leaf.
        parts: The parts into which it is split, for each split.
    """

    kind: str
    parents: tuple[Node, ...] = ()
    value: Any = None
    shape: tuple[int, ...] = ()
    name: str = ""
    parts: list[Parts] = field(default_factory=list)


@dataclass(eq=False)
class Parts:
    """The parts of an array along an axis; without that axis where they are `items`."""

    axis: int
    sizes: tuple[int, ...]
    nodes: list[Node]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes tensors without memory for arrays, and records how others are made from them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nodes: dict[int, Node] = {}
        self._alive: list[torch.Tensor] = []  # so that no id is used again

    def leaf(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor that represents an array."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._keep(tensor, Node("leaf", shape=tuple(shape), name=name))
        return tensor

    def node(self, tensor: torch.Tensor) -> Node:
        """Returns what a tensor is made from."""
        return self._nodes[id(tensor)]

    def _keep(self, tensor: torch.Tensor, node: Node) -> None:
        self._alive.append(tensor)
        self._nodes[id(tensor)] = node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and records it if its operands are tracked."""
        out = func(*args, **(kwargs or {}))
        given = list(args[0]) if args and isinstance(args[0], list | tuple) else args[:1]
        if not given or not all(id(x) in self._nodes for x in given):
            return out
        parents = tuple(self._nodes[id(x)] for x in given)
        outs = list(out) if isinstance(out, list | tuple) else [out]
        for tensor, node in zip(outs, self._record(func, parents, args, outs), strict=True):
            self._keep(tensor, node)
        return out

    def _record(
        self, func: Any, parents: tuple[Node, ...], args: Any, outs: list[torch.Tensor]
    ) -> list[Node]:
        parent, shape = parents[0], tuple(outs[0].shape)
        if func in _SAME or (func is _aten._to_copy.default):
            return [parent]
        if func in _SHAPES:
            return [_reshape(parent, shape)]
        if func is _aten.transpose.int:
            axes = list(range(len(shape)))
            a, b = args[1] % len(shape), args[2] % len(shape)
            axes[a], axes[b] = b, a
            return [Node("transpose", parents, tuple(axes), shape)]
        if func is _aten.t.default:
            return [Node("transpose", parents, (1, 0), shape)]
        if func is _aten.permute.default:
            axes = [axis % len(shape) for axis in args[1]]
            return [Node("transpose", parents, tuple(axes), shape)]
        axis = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        if func is _aten.cat.default:
            if len(parents) == 1:
                return [parent]
            return [Node("concatenate", parents, axis % len(shape), shape)]
        if func is _aten.stack.default:
            return [Node("stack", parents, axis % len(shape), shape)]
        if func in (_aten.split.Tensor, _aten.split_with_sizes.default):
            axis = (args[2] if len(args) > 2 else 0) % len(shape)
            return _parts(parent, axis, [out.shape[axis] for out in outs])
        if func is _aten.unbind.int:
            axis = axis % len(parent.shape)
            return [_reshape(one, shape) for one in _parts(parent, axis, [1] * len(outs))]
        raise CheckpointError(f"{func} is not an operation that only moves elements")


def _reshape(parent: Node, shape: tuple[int, ...]) -> Node:
    if shape == parent.shape:
        return parent
    assert math.prod(shape) == math.prod(parent.shape)
    return Node("reshape", (parent,), None, shape)


def _parts(parent: Node, axis: int, sizes: Sequence[int]) -> list[Node]:
    if len(sizes) == 1:
        return [parent]
    parts = Parts(axis, tuple(sizes), [])
    for at, size in enumerate(sizes):
        shape = (*parent.shape[:axis], size, *parent.shape[axis + 1 :])
        parts.nodes.append(Node("part", (parent,), (parts, at), shape))
    parent.parts.append(parts)
    return parts.nodes
