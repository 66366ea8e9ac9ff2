"""Boxes: a range of each dimension of an array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]
Ranges: TypeAlias = Sequence[tuple[int, int] | slice]  # a user's notation of a box


def full_box(shape: Sequence[int]) -> Box:
    """Returns the box of all elements of a shape."""
    return tuple((0, size) for size in shape)


def as_box(box: Ranges | None, shape: Sequence[int]) -> Box:
    """Returns a box with a start and a stop for each dimension.

    Args:
        box: For each dimension `(start, stop)` or a slice of step 1; None for everything.
        shape: The shape of the array.

    Raises:
        IndexError: The box does not fit the shape.

    Examples:
        >>> as_box((slice(None), (1, 3)), (4, 5))
        ((0, 4), (1, 3))
    """
    if box is None:
        return full_box(shape)
    if len(box) != len(shape):
        raise IndexError(
            f"a box of {len(box)} ranges does not fit an array of shape {tuple(shape)}"
        )
    bounds = []
    for place, size in zip(box, shape, strict=True):
        if isinstance(place, slice):
            if place.step not in (None, 1):
                raise IndexError(f"{place}: slices must have a step of 1")
            start, stop, _ = place.indices(size)
            stop = max(start, stop)
        else:
            start, stop = place
        if not 0 <= start <= stop <= size:
            raise IndexError(f"the range {(start, stop)} is not within a dimension of {size}")
        bounds.append((int(start), int(stop)))
    return tuple(bounds)


def box_shape(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(stop - start for start, stop in box)


def box_slices(box: Box) -> tuple[slice, ...]:
    """Returns a box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def flat_range(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """Returns the range of a box in C order; None if its elements are not contiguous."""
    start, row = 0, math.prod(shape)
    is_whole = True  # the dimensions before it have a single index
    for (low, high), size in zip(box, shape, strict=True):
        if not is_whole and (low, high) != (0, size):
            return None
        row = row // size if size else 0
        start += low * row
        is_whole = is_whole and high - low == 1
    return start, start + math.prod(box_shape(box))


def panel_boxes(shape: Sequence[int], elements: int) -> Iterator[Box]:
    """Yields consecutive boxes in C order, with at most `elements` elements each.

    Examples:
        >>> list(panel_boxes((4, 3), 6))
        [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    """
    elements = max(1, elements)
    if math.prod(shape) <= elements:
        yield full_box(shape)
        return
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= elements)
    rows = max(1, elements // max(1, math.prod(shape[axis + 1 :])))
    rows = math.ceil(shape[axis] / math.ceil(shape[axis] / rows))  # of equal size
    rest = full_box(shape[axis + 1 :])
    for index in itertools.product(*map(range, shape[:axis])):
        head = tuple((at, at + 1) for at in index)
        for start in range(0, shape[axis], rows):
            yield (*head, (start, min(start + rows, shape[axis])), *rest)


def parts_of_box(box: Box, elements: int) -> Iterator[tuple[Box, Any]]:
    """Divides a box into consecutive ones; yields each with its index in an array of the box.

    Examples:
        >>> list(parts_of_box(((4, 6), (1, 3)), 2))[1]
        (((5, 6), (1, 3)), (slice(1, 2, None), slice(0, 2, None), Ellipsis))
    """
    for part in panel_boxes(box_shape(box), elements):
        pairs = zip(part, box, strict=True)
        inner = tuple((begin + low, begin + high) for (low, high), (begin, _) in pairs)
        yield inner, (*box_slices(part), ...)


def overlap(a: Box, b: Box) -> Box | None:
    """Returns what two boxes have in common; None if that is nothing."""
    common = tuple((max(x, y), min(s, t)) for (x, s), (y, t) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(box: Box, outer: Box) -> Box:
    """Returns a box as the place in another one that contains it."""
    return tuple((start - a, stop - a) for (start, stop), (a, _) in zip(box, outer, strict=True))


def reshape(box: Box, shape: Sequence[int], new: Sequence[int]) -> Iterator[Box]:
    """Yields the boxes of a new shape that have the elements of a box, all in C order."""
    for start, stop in _runs(box, shape):
        yield from _rows(start, stop, new)


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
