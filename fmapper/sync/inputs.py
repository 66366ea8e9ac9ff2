"""Arrays of a source as operands of lazy arrays: which boxes a target needs, and their values."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.checkpoints import lazy_operations as ops
from fmapper.checkpoints.boxes import Box, box_shape, box_slices, full_box, overlap, reshape, within
from fmapper.checkpoints.lazy import LazyArray, Operation

if TYPE_CHECKING:
    import numpy as np


class Leaf(LazyArray):
    """An array of a source by its name, without its values."""

    has_values = False

    def __init__(self, name: str, shape: Sequence[int], dtype: Any) -> None:
        self.name, self.shape, self.dtype = name, tuple(shape), dtype


class Input(LazyArray):
    """An array of a source with what is done to each element, which is done before it is sent."""

    def __init__(self, leaf: Leaf, steps: Sequence[ops.Step]) -> None:
        self.name, self.steps, self.shape = leaf.name, steps, leaf.shape
        self.dtype = steps[-1].dtype if steps else leaf.dtype
        self.parts: dict[Box, LazyArray] = {}  # in this process; others read as zeros

    def supply(self, box: Box, values: LazyArray) -> None:
        """Gives it a part of the array, of which each element is changed here."""
        self.parts[box] = with_steps(values, self.steps)

    def pieces(self, box: Box) -> Iterator[tuple[Any, LazyArray]]:
        """Yields the parts of a box that are here: an index in the box, and the values."""
        if (whole := self.parts.get(box)) is not None:
            yield ..., whole
            return
        for held, values in self.parts.items():
            common = overlap(held, box)
            if common is not None:
                index = (*box_slices(within(common, box)), ...)
                yield index, values.part(within(common, held))

    def _read(self, box: Box) -> Any:
        import numpy as np

        pieces = [part for _, part in self.pieces(box)]
        if len(pieces) == 1 and pieces[0].shape == box_shape(box):
            return pieces[0]._read(full_box(pieces[0].shape))
        out = np.zeros(box_shape(box), self.dtype)
        self._fill(box, out)
        return out

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        for index, part in self.pieces(box):
            part.read(None, out[index])


def reads_of(array: LazyArray, box: Box) -> list[tuple[Any, LazyArray]]:
    """Returns what a box of an array consists of: indices in the box, and arrays to read there."""
    if isinstance(array, Input) and not array.steps:
        return [*array.pieces(box)]
    return [(..., array.part(box))]


def with_steps(array: LazyArray, steps: Iterable[ops.Step]) -> LazyArray:
    """Returns an array, each element of which is changed."""
    for step in steps:
        new = copy.copy(step)
        new.operands, new.shape = (array,), array.shape
        array = new
    return array


def with_inputs(
    array: LazyArray, inputs: dict[Hashable, Input], steps: tuple[ops.Step, ...] = ()
) -> LazyArray:
    """Returns an array made of inputs instead of leaves; equal ones are the same object.

    What is done to each element is done first, so that a cast array is sent as the target has it.
    """
    if isinstance(array, Leaf):
        return inputs.setdefault((array, *steps), Input(array, steps))
    if isinstance(array, ops.EACH):
        return with_inputs(array.operands[0], inputs, (array, *steps))
    if isinstance(array, Operation):
        is_moved = isinstance(array, ops.MOVES)
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
    elif isinstance(array, ops.Concatenate):
        inner = ((operand, part) for operand, part, _ in array.parts(box))
    elif isinstance(array, Operation):
        inner = ((x, part) for x in array.operands for part in _boxes(array, x, box))
    for operand, part in inner:
        yield from needs(operand, part)


def _boxes(array: Operation, operand: LazyArray, box: Box) -> Iterable[Box]:
    if isinstance(array, ops.Part | ops.Transpose):
        return [array.inner(box)]
    if isinstance(array, ops.Reshape):
        pairs = ((new, operand.shape[old]) for old, new in array.groups)
        each = (reshape(box[new], array.shape[new], old) for new, old in pairs)
        return (tuple(itertools.chain(*parts)) for parts in itertools.product(*each))
    return [box if isinstance(array, (*ops.EACH, ops.Sum)) else full_box(operand.shape)]
