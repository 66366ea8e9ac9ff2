"""Lazy arrays as nodes: equal arrays share a node, and parts know their siblings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fmapper.checkpoints import lazy_operations as ops
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.checkpoints.recording.abstract import Later, Named, Unwritten
from fmapper.errors import CheckpointError
from fmapper.files.dtypes import numpy_dtype


@dataclass(eq=False)
class Node:
    """An array, and how it is computed from others.

    Attributes:
        kind: `leaf`, `constant`, `reshape`, `transpose`, `cast`, `offset`, `scale`, `concatenate`,
            `stack`, `sum`, or `part` of another.
        parents: The nodes of its operands.
        value: The new axes, the axis, the number or dtype; of a part, the parts and its index.
        shape: Its shape.
        name: The name of a leaf.
        ranges: The nodes of its parts by axis, start and stop.
    """

    kind: str
    parents: tuple[Node, ...] = ()
    value: Any = None
    shape: tuple[int, ...] = ()
    name: str = ""
    ranges: dict[tuple[int, int, int], Node] = field(default_factory=dict)


@dataclass(eq=False)
class Parts:
    """The parts of an array along an axis."""

    axis: int
    sizes: tuple[int, ...]
    nodes: list[Node]


class Graph:
    """The nodes of lazy arrays."""

    def __init__(self) -> None:
        self._nodes: dict[Any, Node] = {}
        self._of: dict[int, tuple[LazyArray, Node]] = {}

    def node(self, array: LazyArray) -> Node:
        """Returns the node of an array.

        Raises:
            CheckpointError: It has elements that were never written, or values that do not come
                from named arrays.
        """
        if id(array) not in self._of:
            self._of[id(array)] = array, self._make(array)
        return self._of[id(array)][1]

    def _make(self, array: LazyArray) -> Node:
        if isinstance(array, Later):
            return self.node(array.value)
        if isinstance(array, Named):
            return self._intern("leaf", (), None, array.shape, array.name)
        if isinstance(array, ops.Concatenate):
            return self._concatenate(array)
        if isinstance(array, ops.Sum):
            parents = tuple(map(self.node, array.operands))
            return self._intern("sum", parents, None, array.shape)
        if not isinstance(array, Operation):
            return self._constant(array)
        parent = self.node(array.operands[0])
        if parent.kind == "constant":
            return self._constant_like(parent, array)
        if isinstance(array, ops.Part):
            for axis, (start, stop) in enumerate(array.box):
                parent = self._part(parent, axis, start, stop)
            return parent
        kind, value = _single(array)
        return self._intern(kind, (parent,), value, array.shape)

    def _intern(
        self, kind: str, parents: tuple[Node, ...], value: Any, shape: Sequence[int], name: str = ""
    ) -> Node:
        key = kind, tuple(map(id, parents)), value, tuple(shape), name
        if key not in self._nodes:
            self._nodes[key] = Node(kind, parents, value, tuple(shape), name)
        return self._nodes[key]

    def _constant(self, array: LazyArray) -> Node:
        if isinstance(array, Unwritten):
            raise CheckpointError("it has elements that are never written")
        values = array.read()
        first = values.reshape(-1)[:1]
        if values.tobytes() != first.tobytes() * values.size:
            raise CheckpointError(
                f"it has values that depend on no array of the state, and not the same everywhere: "
                f"{array.dtype.name}{list(array.shape)}"
            )
        number = first.item() if first.size else 0
        return self._intern("constant", (), (number, array.dtype.name), array.shape)

    def _constant_like(self, parent: Node, array: LazyArray) -> Node:
        number, dtype = parent.value
        scalar = LazyArray.full((), number, numpy_dtype(dtype))
        if isinstance(array, ops.Offset):
            scalar = ops.Offset(scalar, array.value)
        elif isinstance(array, ops.Scale):
            scalar = ops.Scale(scalar, array.factor, array.divide)
        else:
            scalar = scalar.astype(array.dtype)
        value = scalar.read().item(), array.dtype.name
        return self._intern("constant", (), value, array.shape)

    def _concatenate(self, array: ops.Concatenate) -> Node:
        axis, operands = array.along, list(_operands(array))
        if all(isinstance(x, ops.Reshape) and x.shape[axis] == 1 for x in operands):
            rest = (*array.shape[:axis], *array.shape[axis + 1 :])
            parents = tuple(self.node(x.reshape(rest)) for x in operands)
            kind = "stack"
        else:
            parents, kind = tuple(map(self.node, operands)), "concatenate"
        values = {parent.value for parent in parents if parent.kind == "constant"}
        if len(values) == 1 and all(parent.kind == "constant" for parent in parents):
            return self._intern("constant", (), values.pop(), array.shape)
        return self._intern(kind, parents, axis, array.shape)

    def _part(self, parent: Node, axis: int, start: int, stop: int) -> Node:
        if (start, stop) == (0, parent.shape[axis]):
            return parent
        if parent.kind == "concatenate" and parent.value == axis:
            begin = 0
            for operand in parent.parents:
                end = begin + operand.shape[axis]
                if begin <= start and stop <= end:
                    return self._part(operand, axis, start - begin, stop - begin)
                begin = end
        key = axis, start, stop
        if key not in parent.ranges:
            shape = (*parent.shape[:axis], stop - start, *parent.shape[axis + 1 :])
            parent.ranges[key] = Node("part", (parent,), None, shape)
        return parent.ranges[key]

    def divide(self) -> None:
        """Gives each part its place among its siblings; unused ranges become parts, too."""
        parents = {id(node): node for node in self._nodes.values()}
        todo = list(parents.values())
        while todo:
            parent = todo.pop()
            todo += parent.ranges.values()
            rows: list[list[tuple[int, int, int]]] = []
            for key in sorted(parent.ranges):
                fits = (row for row in rows if row[-1][0] == key[0] and row[-1][2] <= key[1])
                row = next(fits, None)
                if row is None:
                    rows.append([key])
                else:
                    row.append(key)
            for row in rows:
                self._divide(parent, row)

    def _divide(self, parent: Node, row: Sequence[tuple[int, int, int]]) -> None:
        axis, at = row[0][0], 0
        parts = Parts(axis, (), [])
        for _, start, stop in (*row, (axis, parent.shape[axis], parent.shape[axis])):
            for low, high in ((at, start), (start, stop)):
                if low == high:
                    continue
                shape = (*parent.shape[:axis], high - low, *parent.shape[axis + 1 :])
                node = parent.ranges.get((axis, low, high)) if low == start else None
                node = node or Node("part", (parent,), None, shape)
                node.value = parts, len(parts.nodes)
                parts.nodes.append(node)
                parts.sizes += (high - low,)
            at = stop


def _operands(array: ops.Concatenate) -> Iterator[LazyArray]:
    """Yields the arrays that are joined along one dimension, also by nested concatenations."""
    for operand in array.operands:
        if isinstance(operand, ops.Concatenate) and operand.along == array.along:
            yield from _operands(operand)
        else:
            yield operand


def _single(array: Operation) -> tuple[str, Any]:
    """Returns kind and value of an operation with one operand."""
    old, new = array.operands[0], array.dtype
    if isinstance(array, ops.Transpose):
        return "transpose", array.axes
    if isinstance(array, ops.Reshape):
        return "reshape", None
    if isinstance(array, ops.Offset):
        return "offset", (array.value,)
    if isinstance(array, ops.Scale):
        return "scale", (array.factor, array.divide)
    if isinstance(array, ops.Cast):
        return "cast", (new.name, old.dtype.name if _widens(old.dtype, new) else None)
    raise CheckpointError(f"no rule has the effect of {type(array).__name__}")


def _widens(old: Any, new: Any) -> bool:
    """Returns whether another dtype can represent each value of a dtype."""
    import numpy as np

    try:
        return bool(np.promote_types(old, new) == new)
    except TypeError:
        return False


def leaves_of(nodes: Sequence[Node]) -> dict[str, None]:
    """Returns the names of the arrays from which nodes are computed."""
    names: dict[str, None] = {}
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen.add(id(node))
            todo += node.parents
            if node.kind == "leaf":
                names[node.name] = None
    return names
