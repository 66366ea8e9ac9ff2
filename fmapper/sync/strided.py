"""Lazy arrays as strided copies: which elements of which array become which elements of it.

Rules describe an array as operations on others. Renaming, transposing, reshaping, splitting and
joining only move elements, and what they give is a list of `Piece`s, each of which a single copy
between two strided views carries out. Reading a box of either side clips the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.checkpoints.boxes import Box, box_shape
from fmapper.checkpoints.lazy import LazyArray

if TYPE_CHECKING:
    from fmapper.checkpoints.lazy_operations import Cast, Offset, Scale


class Leaf(LazyArray):
    """An array without values that operations start from.

    Attributes:
        name: Its name.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: Any) -> None:
        self.name, self.shape, self.dtype = name, tuple(shape), dtype

    @property
    def has_values(self) -> bool:
        """Returns False."""
        return False


class Dim(NamedTuple):
    """A dimension of a piece: its size, and its steps in the source and in the target."""

    size: int
    source: int
    target: int


class Piece(NamedTuple):
    """Elements of a leaf that become elements of a result.

    Places are those of elements in C order.

    Attributes:
        leaf: The array that they come from.
        source: The place of the first one there.
        target: Its place in the result.
        dims: The dimensions, the one with the largest step in the target first.
        steps: What is done to each element, in order.
    """

    leaf: LazyArray
    source: int
    target: int
    dims: tuple[Dim, ...]
    steps: tuple[Cast | Offset | Scale, ...] = ()

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(dim.size for dim in self.dims)

    @property
    def is_dense(self) -> bool:
        """Whether it takes consecutive elements to consecutive places."""
        return all(dim.source == dim.target == 1 for dim in self.dims) and len(self.dims) < 2

    def flip(self) -> Piece:
        """Returns the piece with source and target in each other's place."""
        dims = [Dim(size, target, source) for size, source, target in self.dims]
        return Piece(self.leaf, self.target, self.source, tuple(dims), self.steps)


def pieces_of(array: LazyArray) -> list[Piece]:
    """Returns the pieces that make up an array.

    Leaves are all arrays that are not operations, and those that are computed from several
    elements each, such as sums.
    """
    from fmapper.checkpoints.lazy_operations import (
        Cast,
        Concatenate,
        Offset,
        Part,
        Reshape,
        Scale,
        Transpose,
    )

    if not array.size:
        return []
    if isinstance(array, Reshape):
        return pieces_of(array.operands[0])
    if isinstance(array, Cast | Offset | Scale):
        inner = pieces_of(array.operands[0])
        return [piece._replace(steps=(*piece.steps, array)) for piece in inner]
    if isinstance(array, Part):
        operand = array.operands[0]
        return clip(pieces_of(operand), operand.shape, array.box)
    if isinstance(array, Transpose):
        operand = array.operands[0]
        steps = _steps(array.shape)
        places = [steps[array.axes.index(axis)] for axis in range(array.ndim)]
        return _merge(_map(pieces_of(operand), operand.shape, places))
    if isinstance(array, Concatenate):
        steps, pieces, start = _steps(array.shape), list[Piece](), 0
        for operand in array.operands:
            begin = start * steps[array.along]
            pieces += _map(pieces_of(operand), operand.shape, steps, begin)
            start += operand.shape[array.along]
        return _merge(pieces)
    return [Piece(array, 0, 0, _dense(array.size))]


def clip(pieces: Iterable[Piece], shape: Sequence[int], box: Box) -> list[Piece]:
    """Returns the parts of pieces in a box of the target, with their places in that box."""
    steps = _steps(box_shape(box))
    begin = -sum(start * step for (start, _), step in zip(box, steps, strict=True))
    inner = (part for piece in pieces for part in _clip(piece, shape, box))
    return _merge(_map(inner, shape, steps, begin))


def clip_source(pieces: Iterable[Piece], shape: Sequence[int], box: Box) -> list[Piece]:
    """Returns the parts of pieces in a box of the source, with their places in that box."""
    clipped = clip((piece.flip() for piece in pieces), shape, box)
    return [_sort_dims(piece.flip()) for piece in clipped]


class View(NamedTuple):
    """A strided view of an array, in elements of it.

    Attributes:
        start: The index of its first element.
        shape: Its shape.
        steps: For each dimension, the axis of the array that it runs along, and its step there.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is an array as it is, if the shape is the same."""
        return not any(self.start) and all(pair == (n, 1) for n, pair in enumerate(self.steps))

    def part(self, dimension: int, start: int, stop: int) -> View:
        """Returns the part between two indices of a dimension."""
        axis, step = self.steps[dimension]
        first = [*self.start]
        first[axis] += start * step
        shape = (*self.shape[:dimension], stop - start, *self.shape[dimension + 1 :])
        return View(tuple(first), shape, self.steps)


def views(piece: Piece, source: Sequence[int], target: Sequence[int]) -> list[tuple[View, View]]:
    """Returns pairs of views of one shape, of arrays of two shapes, that are a piece."""
    pairs = []
    shape = tuple(source)
    if shape == tuple(target) and piece.is_dense and piece.size == math.prod(shape):
        whole = View((0,) * len(shape), shape, tuple((axis, 1) for axis in range(len(shape))))
        return [(whole, whole)]
    for part in _refine(piece, target):
        for both in _refine(part.flip(), source):
            aligned = _sort_dims(both.flip())
            shape = tuple(dim.size for dim in aligned.dims)
            froms = _view(aligned.source, [dim.source for dim in aligned.dims], shape, source)
            pairs.append(
                (froms, _view(aligned.target, [dim.target for dim in aligned.dims], shape, target))
            )
    return pairs


def _view(start: int, steps: Sequence[int], sizes: tuple[int, ...], shape: Sequence[int]) -> View:
    return View(_unravel(start, shape), sizes, tuple(_axis_of(step, shape) for step in steps))


def _steps(shape: Sequence[int]) -> list[int]:
    """Returns the step of each dimension of a shape in C order."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _dense(size: int) -> tuple[Dim, ...]:
    return (Dim(size, 1, 1),) if size > 1 else ()


def _unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(place // step % size for step, size in zip(_steps(shape), shape, strict=True))


def _axis_of(step: int, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the axis along which a step of a refined piece runs, and the step there."""
    for axis, (inner, size) in enumerate(zip(_steps(shape), shape, strict=True)):
        if size > 1 and inner <= step < inner * size:
            return axis, step // inner
    raise AssertionError("a step beyond the shape")


def _map(
    pieces: Iterable[Piece], shape: Sequence[int], steps: Sequence[int], begin: int = 0
) -> Iterator[Piece]:
    """Yields pieces with other steps of the target for each axis of its shape."""
    for piece in pieces:
        for part in _refine(piece, shape):
            start = begin
            for at, step in zip(_unravel(part.target, shape), steps, strict=True):
                start += at * step
            dims = []
            for dim in part.dims:
                axis, inner = _axis_of(dim.target, shape)
                dims.append(dim._replace(target=inner * steps[axis]))
            yield part._replace(target=start, dims=tuple(dims))


def _refine(piece: Piece, shape: Sequence[int]) -> Iterator[Piece]:
    """Yields parts of a piece, each dimension of which runs along one axis of the target."""
    inner = _steps(shape)
    for axis in reversed(range(len(shape))):
        size, unit = shape[axis], inner[axis]
        dims = [dim for dim in piece.dims if unit <= dim.target < unit * size]
        if not dims:
            continue
        start = piece.target // unit % size
        widest = max(dims, key=lambda dim: dim.target)
        if any(dim.target % unit for dim in dims):
            yield from _each(piece, widest, shape)
            return
        reach = sum(dim.target // unit * (dim.size - 1) for dim in dims)
        if start + reach < size:
            continue
        step = widest.target // unit
        rest = reach - step * (widest.size - 1)
        count = (size - 1 - rest - start) // step + 1  # up to the end of the axis
        if start + rest >= size:
            yield from _each(piece, widest, shape)
            return
        if start < step and size % step == 0 and count == size // step:
            rows, left = divmod(widest.size, count)
            if rows > 1 or not left:
                outer = Dim(rows, widest.source * count, widest.target * count)
                whole = _with(piece, widest, outer, widest._replace(size=count))
                yield from _refine(whole, shape)
                if left:
                    yield from _refine(_cut(piece, widest, rows * count, widest.size), shape)
                return
        yield from _refine(_cut(piece, widest, 0, count), shape)
        yield from _refine(_cut(piece, widest, count, widest.size), shape)
        return
    yield piece


def _each(piece: Piece, dim: Dim, shape: Sequence[int]) -> Iterator[Piece]:
    for at in range(dim.size):
        yield from _refine(_cut(piece, dim, at, at + 1), shape)


def _with(piece: Piece, dim: Dim, *new: Dim) -> Piece:
    """Returns a piece with other dimensions in the place of one."""
    at = piece.dims.index(dim)
    kept = tuple(each for each in new if each.size > 1)
    return piece._replace(dims=(*piece.dims[:at], *kept, *piece.dims[at + 1 :]))


def _cut(piece: Piece, dim: Dim, start: int, stop: int) -> Piece:
    """Returns the part of a piece between two indices of a dimension."""
    cut = _with(piece, dim, dim._replace(size=stop - start))
    return cut._replace(
        source=piece.source + start * dim.source, target=piece.target + start * dim.target
    )


def _clip(piece: Piece, shape: Sequence[int], box: Box) -> Iterator[Piece]:
    if all((0, size) == bounds for size, bounds in zip(shape, box, strict=True)):
        yield piece
        return
    inner = _steps(shape)
    for part in _refine(piece, shape):
        parts = [part]
        for axis, (low, high) in enumerate(box):
            if (low, high) != (0, shape[axis]):
                unit, size = inner[axis], shape[axis]
                parts = [new for old in parts for new in _clip_axis(old, unit, size, low, high)]
        yield from parts


def _clip_axis(piece: Piece, unit: int, size: int, low: int, high: int) -> Iterator[Piece]:
    start = piece.target // unit % size
    dims = [dim for dim in piece.dims if unit <= dim.target < unit * size]
    reach = sum(dim.target // unit * (dim.size - 1) for dim in dims)
    if low <= start and start + reach < high:
        yield piece
    elif start + reach >= low and start < high and dims:
        dim = max(dims, key=lambda dim: dim.target)
        step = dim.target // unit
        rest = reach - step * (dim.size - 1)
        first = max(0, -((start - low) // step))  # whose elements all are in the range
        last = min(dim.size - 1, (high - 1 - rest - start) // step)
        if first <= last:
            yield _cut(piece, dim, first, last + 1)
        for at in range(dim.size) if rest else ():
            begin = start + at * step
            if not first <= at <= last and begin < high and begin + rest >= low:
                yield from _clip_axis(_cut(piece, dim, at, at + 1), unit, size, low, high)


def _sort_dims(piece: Piece) -> Piece:
    return piece._replace(dims=tuple(sorted(piece.dims, key=lambda dim: -dim.target)))


def _merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Merges dimensions where one continues the other in the source and in the target."""
    merged = []
    for piece in map(_sort_dims, pieces):
        dims: list[Dim] = []
        for dim in piece.dims:
            outer = dims[-1] if dims else None
            if outer and (outer.source, outer.target) == (
                dim.source * dim.size,
                dim.target * dim.size,
            ):
                dims[-1] = dim._replace(size=dim.size * outer.size)
            else:
                dims.append(dim)
        merged.append(piece._replace(dims=tuple(dims)))
    return merged
