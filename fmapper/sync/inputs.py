"""Arrays of a source as operands of lazy arrays: which boxes a target needs, and their values."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from fmapper.checkpoints.boxes import Box, box_shape, box_slices, flat_range, full_box
from fmapper.checkpoints.dense import copy_into
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.checkpoints.lazy_operations import (
    Cast,
    Concatenate,
    Offset,
    Part,
    Reshape,
    Scale,
    Sum,
    Transpose,
)

if TYPE_CHECKING:
    import numpy as np

Step: TypeAlias = Cast | Offset | Scale  # what is done to each element
MOVES = (Concatenate, Part, Reshape, Transpose)  # operations that only move elements
EACH = (Cast, Offset, Scale)


class Leaf(LazyArray):
    """An array of a source, without its values.

    Attributes:
        name: Its name.
    """

    has_values = False

    def __init__(self, name: str, shape: Sequence[int], dtype: Any) -> None:
        self.name, self.shape, self.dtype = name, tuple(shape), dtype


class Input(LazyArray):
    """An array of a source with what is done to each element, which is done before it is sent.

    Attributes:
        name: The name of the array.
        steps: What is done to each element, in order.
        parts: During a call, the values that are in this process. Others read as zeros.
    """

    def __init__(self, leaf: Leaf, steps: Sequence[Step]) -> None:
        self.name, self.steps, self.shape = leaf.name, steps, leaf.shape
        self.dtype = steps[-1].dtype if steps else leaf.dtype
        self.parts: dict[Box, LazyArray] = {}

    def _pieces(self, box: Box) -> Iterator[tuple[Any, np.ndarray[Any, Any]]]:
        """Yields the parts of a box that are here: an index in the box, and the values."""
        if (whole := self.parts.get(box)) is not None:
            yield ..., whole._read(full_box(whole.shape))
            return
        for held, values in self.parts.items():
            common = overlap(held, box)
            if common is not None:
                yield (*box_slices(_within(common, box)), ...), values._read(_within(common, held))

    def _read(self, box: Box) -> Any:
        import numpy as np

        pieces = [*self._pieces(box)]
        if len(pieces) == 1 and pieces[0][1].shape == box_shape(box):
            return pieces[0][1]
        out = np.zeros(box_shape(box), self.dtype)
        for index, values in pieces:
            copy_into(out[index], values)
        return out

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        for index, values in self._pieces(box):
            copy_into(out[index], values)


def overlap(a: Box, b: Box) -> Box | None:
    """Returns what two boxes have in common; None if that is nothing."""
    common = tuple((max(x, y), min(s, t)) for (x, s), (y, t) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _within(box: Box, outer: Box) -> Box:
    return tuple((start - a, stop - a) for (start, stop), (a, _) in zip(box, outer, strict=True))


def with_steps(array: LazyArray, steps: Iterable[Step]) -> LazyArray:
    """Returns an array, each element of which is changed."""
    for step in steps:
        new = copy.copy(step)
        new.operands, new.shape = (array,), array.shape
        array = new
    return array


def with_inputs(
    array: LazyArray, inputs: dict[Hashable, Input], steps: tuple[Step, ...] = ()
) -> LazyArray:
    """Returns an array made of inputs instead of leaves; equal ones are the same object.

    What is done to each element is done first, so that a cast array is sent as the target has it.
    """
    if isinstance(array, Leaf):
        return inputs.setdefault((array, *steps), Input(array, steps))
    if isinstance(array, EACH):
        return with_inputs(array.operands[0], inputs, (array, *steps))
    if isinstance(array, Operation):
        is_moved = isinstance(array, MOVES)
        inner = steps if is_moved else ()
        new = copy.copy(array)
        new.operands = tuple(with_inputs(operand, inputs, inner) for operand in array.operands)
        if is_moved:
            new.dtype = new.operands[0].dtype
            return new
        array = new
    return with_steps(array, steps)


def nodes_of(array: LazyArray) -> Iterator[LazyArray]:
    """Yields an array and all that it is made of."""
    yield array
    for operand in array.operands if isinstance(array, Operation) else ():
        yield from nodes_of(operand)


def leaves_of(array: LazyArray) -> Iterator[Any]:
    """Yields the leaves, or inputs, that an array is made of."""
    return (each for each in nodes_of(array) if isinstance(each, Leaf | Input))


def needs(array: LazyArray, box: Box) -> Iterator[tuple[Input, Box]]:
    """Yields the boxes of inputs that a box of an array is made of, and nothing beside them."""
    inner: Iterable[tuple[LazyArray, Box]] = ()
    if isinstance(array, Input):
        yield array, box
    elif isinstance(array, Concatenate):
        inner = ((operand, part) for operand, part, _ in array.parts(box))
    elif isinstance(array, Operation):
        inner = ((x, part) for x in array.operands for part in _boxes(array, x, box))
    for operand, part in inner:
        yield from needs(operand, part)


def _boxes(array: Operation, operand: LazyArray, box: Box) -> Iterable[Box]:
    if isinstance(array, Part | Transpose):
        return [array.inner(box)]
    if isinstance(array, Reshape):
        each = (
            [part for run in _runs(box[new], array.shape[new]) for part in _rows(*run, old)]
            for new, old in ((new, operand.shape[before]) for before, new in array.groups)
        )
        return (tuple(itertools.chain(*parts)) for parts in itertools.product(*each))
    return [box if isinstance(array, (*EACH, Sum)) else full_box(operand.shape)]


def _runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the ranges of elements in C order that a box takes."""
    whole = flat_range(box, shape)
    if whole is not None:
        yield whole
        return
    axis = next(axis for axis, (start, stop) in enumerate(box) if stop - start > 1)
    for at in range(*box[axis]):
        yield from _runs((*box[:axis], (at, at + 1), *box[axis + 1 :]), shape)


def _rows(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yields the boxes of a shape that take a range of elements in C order."""
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within a row
        ends = [(last, start - last * row, stop - last * row)]
    else:
        ends = [(first - 1, start % row, row)] if start % row else []
        if first < last:
            yield ((first, last), *full_box(shape[1:]))
        ends += [(last, 0, stop % row)] if stop % row else []
    for at, begin, end in ends:
        for rest in _rows(begin, end, shape[1:]):
            yield ((at, at + 1), *rest)
