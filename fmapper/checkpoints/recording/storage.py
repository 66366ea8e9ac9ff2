"""Storages without memory, whose contents are lazy arrays.

Frameworks describe a view by its offset and strides. Reading a view of a `Storage` returns its
elements as a lazy array, and writing to it changes all other views of that storage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.checkpoints.boxes import Box, box_shape
from fmapper.checkpoints.lazy import LazyArray, concatenate
from fmapper.checkpoints.lazy_operations import Concatenate
from fmapper.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np


class StorageView(NamedTuple):
    """A view of memory, in elements.

    Attributes:
        offset: The position of its first element.
        shape: Its shape.
        strides: The step of each dimension.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], index: Sequence[slice]) -> StorageView:
        """Returns the view of an array in C order at an index of slices, one for each dimension."""
        offset, sizes, strides = 0, [], []
        for axis, (size, part) in enumerate(zip(shape, index, strict=True)):
            start, stop, step = part.indices(size)
            row = math.prod(shape[axis + 1 :])
            sizes.append(len(range(start, stop, step)))
            strides.append(step * row)
            offset += start * row
        return cls(offset, tuple(sizes), tuple(strides))


class Storage:
    """Memory that arrays of a framework share.

    Attributes:
        content: Its elements in C order.
    """

    def __init__(self, content: LazyArray) -> None:
        self.content = content

    def read(self, view: StorageView) -> LazyArray:
        """Returns the elements of a view."""
        if 0 in view.shape:
            return LazyArray.full(view.shape, 0, self.content.dtype)
        flipped = [axis for axis, step in enumerate(view.strides) if step < 0]
        if flipped:
            array = self.read(_unflip(view))
            for axis in flipped:
                array = concatenate(array.split(array.shape[axis], axis)[::-1], axis)
            return array
        repeated = [
            axis
            for axis, (size, step) in enumerate(zip(view.shape, view.strides, strict=True))
            if step == 0 and size > 1
        ]
        if repeated:
            shape = [1 if axis in repeated else n for axis, n in enumerate(view.shape)]
            array = self.read(StorageView(view.offset, tuple(shape), view.strides))
            for axis in repeated:
                array = concatenate([array] * view.shape[axis], axis)
            return array
        place = _place(self.content.shape, view)
        if place is None:
            rows = [*_rows(view)]
            return concatenate([self.read(row) for _, _, row in rows], rows[0][1])
        part = self.content.reshape(place.shape).part(place.box)
        return part.reshape(place.sizes).transpose(place.order).reshape(view.shape)

    def write(self, view: StorageView, value: LazyArray) -> None:
        """Replaces the elements of a view.

        Raises:
            CheckpointError: The dtypes differ.
        """
        if 0 in view.shape:
            return
        flipped = [axis for axis, step in enumerate(view.strides) if step < 0]
        for axis in flipped:
            value = concatenate(value.split(value.shape[axis], axis)[::-1], axis)
        place = _place(self.content.shape, _unflip(view))
        if place is None:
            for at, axis, row in _rows(_unflip(view)):
                self.write(row, value.slice(at, at + 1, axis))
            return
        rows = value.reshape([place.sizes[axis] for axis in place.order])
        back = [place.order.index(axis) for axis in range(len(place.order))]
        part = rows.transpose(back).reshape(box_shape(place.box))
        self.content = _replace(self.content.reshape(place.shape), place.box, part)


def _rows(view: StorageView) -> Iterator[tuple[int, int, StorageView]]:
    """Yields the rows of a view that is not a box, such as every second one of five.

    Each row is yielded as its index, the dimension, and its view.
    """
    axis = next(axis for axis, size in enumerate(view.shape) if size > 1)
    shape = (*view.shape[:axis], 1, *view.shape[axis + 1 :])
    for at in range(view.shape[axis]):
        yield at, axis, StorageView(view.offset + at * view.strides[axis], shape, view.strides)


def take(array: LazyArray, positions: np.ndarray[Any, Any]) -> LazyArray:
    """Returns the elements at positions in C order, in the shape of these.

    Args:
        array: The array.
        positions: Whole numbers.
    """
    memory = Storage(array)
    if not positions.size:
        return LazyArray.full(positions.shape, 0, array.dtype)
    view = _even(positions)
    if view is not None:
        return memory.read(view)
    axis, ranges = _divide(positions)
    parts = [positions.take(range(*pair), axis) for pair in ranges]
    return concatenate([take(array, part) for part in parts], axis)


def put(memory: Storage, positions: np.ndarray[Any, Any], value: LazyArray) -> None:
    """Replaces the elements at positions in C order by those of an array of the same shape."""
    if not positions.size:
        return
    view = _even(positions)
    if view is not None:
        memory.write(view, value)
        return
    axis, ranges = _divide(positions)
    for start, stop in ranges:
        part = positions.take(range(start, stop), axis)
        put(memory, part, value.slice(start, stop, axis))


def _even(positions: np.ndarray[Any, Any]) -> StorageView | None:
    """Returns the view with the elements at positions; None if there is none."""
    import numpy as np

    shape = positions.shape
    first = int(positions.flat[0])
    grid = np.full((), first, positions.dtype)
    steps = []
    for axis, size in enumerate(shape):
        second = tuple(int(at == axis) for at in range(len(shape)))
        steps.append(int(positions[second]) - first if size > 1 else 0)
        grid = grid[..., None] + steps[-1] * np.arange(size)
    return StorageView(first, shape, tuple(steps)) if (grid == positions).all() else None


def _divide(positions: np.ndarray[Any, Any]) -> tuple[int, list[tuple[int, int]]]:
    """Returns a dimension and its ranges that divide positions with uneven steps."""
    divisions = [(axis, _runs(positions, axis)) for axis, n in enumerate(positions.shape) if n > 1]
    uneven = [pair for pair in divisions if len(pair[1]) > 1]
    if uneven:
        return min(uneven, key=lambda pair: len(pair[1]))
    axis = divisions[0][0]  # even along each dimension, but with several steps
    return axis, [(at, at + 1) for at in range(positions.shape[axis])]


def _runs(positions: np.ndarray[Any, Any], axis: int) -> list[tuple[int, int]]:
    """Returns the ranges of a dimension in which the steps between positions are the same."""
    import numpy as np

    rows = np.moveaxis(positions, axis, 0).reshape(positions.shape[axis], -1)
    steps = rows[1:] - rows[:-1]
    continues = np.zeros(len(rows), bool)
    continues[1:] = (steps == steps[:, :1]).all(1) & (steps[:, 0] > 0)
    continues[2:] &= (steps[1:, 0] == steps[:-1, 0]) | ~continues[1:-1]
    return [*itertools.pairwise([*np.flatnonzero(~continues).tolist(), len(rows)])]


def _unflip(view: StorageView) -> StorageView:
    """Returns the view with flipped dimensions flipped back."""
    low = view.offset + sum(
        min(0, step * (size - 1)) for step, size in zip(view.strides, view.shape, strict=True)
    )
    return StorageView(low, view.shape, tuple(map(abs, view.strides)))


class _Place(NamedTuple):
    """A view as a box.

    Attributes:
        shape: The shape of the memory that contains the box.
        box: The box.
        sizes: The shape of the box in the dimensions of the view, in memory order.
        order: The permutation from these dimensions to those of the view.
    """

    shape: tuple[int, ...]
    box: Box
    sizes: tuple[int, ...]
    order: list[int]


def _place(base: Sequence[int], view: StorageView) -> _Place | None:
    """Finds the box of memory that a view is; None if it is not a box.

    The memory is divided by the strides of the view and, where possible, of its contents.
    """
    total = math.prod(base)
    strides = [math.prod(base[axis + 1 :]) for axis, size in enumerate(base) if size > 1]
    for more in (strides, []):
        place = _in_grid(total, view, more)
        if place is not None:
            return place
    return None


def _in_grid(total: int, view: StorageView, strides: Sequence[int]) -> _Place | None:
    steps = [step for step, size in zip(view.strides, view.shape, strict=True) if size > 1]
    grid = sorted({total, 1, *strides, *steps}, reverse=True)
    if any(high % low for high, low in itertools.pairwise(grid)):
        return None
    shape = tuple(high // low for high, low in itertools.pairwise(grid))
    starts = [view.offset // low % size for low, size in zip(grid[1:], shape, strict=True)]
    box = [(start, start + 1) for start in starts]
    order: list[int] = []
    for size, step in zip(view.shape, view.strides, strict=True):
        if size == 1:
            continue
        axes: list[int] = []
        axis = grid.index(step) - 1
        rest = size
        while rest > 1:
            if axis < 0 or axis in order or axis in axes:
                return None
            axes.insert(0, axis)
            if starts[axis] + rest <= shape[axis]:
                box[axis] = starts[axis], starts[axis] + rest
                break
            if starts[axis] or rest % shape[axis]:
                return None
            box[axis] = 0, shape[axis]
            rest //= shape[axis]
            axis -= 1
        order += axes
    others = [axis for axis in range(len(shape)) if axis not in order]
    coarse, outer = _merge(shape, box, [low in strides for low in grid[1:]])
    return _Place(coarse, outer, box_shape(tuple(box)), [*others, *order])


def _merge(
    shape: Sequence[int], box: Sequence[tuple[int, int]], ends: Sequence[bool]
) -> tuple[tuple[int, ...], Box]:
    """Merges dimensions as long as the box stays a box, up to the ends of memory dimensions.

    So all parts of an array are taken from the same dimensions, however they are divided later.
    """
    sizes: list[int] = []
    outer: list[tuple[int, int]] = []
    is_open = False
    for size, (start, stop), end in zip(shape, box, ends, strict=True):
        if is_open and ((start, stop) == (0, size) or outer[-1][1] - outer[-1][0] == 1):
            first = outer[-1][0] * size + start
            last = (outer[-1][1] - 1) * size + stop
            sizes[-1], outer[-1] = sizes[-1] * size, (first, last)
        else:
            sizes.append(size)
            outer.append((start, stop))
        is_open = not end
    return tuple(sizes), tuple(outer)


def _replace(array: LazyArray, box: Box, value: LazyArray) -> LazyArray:
    """Returns an array with other elements in a box."""
    if value.dtype != array.dtype:
        raise CheckpointError(f"{value} cannot be written into {array}")
    partial = [axis for axis, size in enumerate(array.shape) if box[axis] != (0, size)]
    if not partial:
        return value
    axis, size = partial[0], array.shape[partial[0]]
    start, stop = box[axis]
    inner = list(box)
    inner[axis] = 0, stop - start
    pieces = [
        *_along(array, 0, start, axis),
        _replace(_join([*_along(array, start, stop, axis)], axis), tuple(inner), value),
        *_along(array, stop, size, axis),
    ]
    return _join(pieces, axis)


def _join(pieces: Sequence[LazyArray], axis: int) -> LazyArray:
    return pieces[0] if len(pieces) == 1 else Concatenate(pieces, axis)


def _along(array: LazyArray, start: int, stop: int, axis: int) -> Iterator[LazyArray]:
    """Yields the arrays that make up a range of a dimension; operands of joins stay whole."""
    if start == stop:
        return
    if not (isinstance(array, Concatenate) and array.along == axis):
        yield array.slice(start, stop, axis)
        return
    begin = 0
    for operand in array.operands:
        end = begin + operand.shape[axis]
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield from _along(operand, low - begin, high - begin, axis)
        begin = end
