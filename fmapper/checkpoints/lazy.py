"""Lazy arrays: arrays in files, and operations on them that do not read them.

An operation on a `LazyArray` is another `LazyArray`. Reading a box of it reads only the needed
boxes of its operands, so a checkpoint of any size is renamed, stacked, split and transposed with
the memory of a panel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.checkpoints.boxes import (
    Box,
    Ranges,
    as_box,
    box_shape,
    box_slices,
    full_box,
    panel_boxes,
)
from fmapper.checkpoints.dense import copy_into, dense
from fmapper.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

_DEEPEST = 100  # nested operations; a rule adds a few


class ByteRun(NamedTuple):
    """Bytes of a stored array, from `start` to `stop`, in C order, little-endian."""

    array: LazyArray
    start: int
    stop: int


class LazyArray:
    """An array in a file that is read on demand.

    A subclass for arrays in a file sets `shape`, `dtype` and `stored`, and defines `_read`; if it
    can read directly into memory, also `_fill`.

    Attributes:
        shape: Its shape.
        dtype: Its dtype; bfloat16 and narrow floats are those of ml_dtypes.
        stored: Whether a file has its bytes as in memory, in C order, so that `byte_runs` can refer
            to them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: bool = False
    _depth: int = 0

    @staticmethod
    def of(array: Any) -> LazyArray:
        """Returns an array in memory as a lazy one."""
        from fmapper.checkpoints import backend as _backend  # noqa: F401  (it moves)

        return _InMemory(array)

    @staticmethod
    def full(shape: Sequence[int], value: Any, dtype: Any) -> LazyArray:
        """Returns an array with the same value everywhere; it takes no memory until it is read."""
        import numpy as np

        scalar = np.asarray(value).astype(dtype)
        if scalar.ndim:
            raise CheckpointError(f"a constant has a single value, not an array of {scalar.shape}")
        return _InMemory(np.broadcast_to(scalar, _as_shape(shape)))

    # a constant itself

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that it takes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        """Shows class, dtype and shape."""
        shape = ", ".join(map(str, self.shape))
        return f"<{type(self).__name__.strip('_')} {self.dtype.name}[{shape}]>"

    def byte_runs(self) -> list[ByteRun] | None:
        """Returns the runs of stored bytes that make up this array.

        They can be copied from file to file. Returns None if the array must be computed.
        """
        return [ByteRun(self, 0, self.nbytes)] if self.stored else None

    @property
    def has_values(self) -> bool:
        """Returns whether it can be read: its operands are in files or in memory."""
        return True

    # its values

    def read(
        self,
        box: Ranges | None = None,
        out: np.ndarray[Any, Any] | None = None,
    ) -> np.ndarray[Any, Any]:
        """Reads the array, or a box of it.

        Args:
            box: For each dimension `(start, stop)` or a slice of step 1; everything if None.
            out: An array of the box's shape and of this dtype, of any strides, to write into.

        Returns:
            `out`; or an array in C order, which may be read-only or share memory with the source.

        Raises:
            IndexError: The box is not within this array.
            LossyCastError: A value is not in the range of the dtype that it is cast to.
        """
        import numpy as np

        bounds = as_box(box, self.shape)
        shape = box_shape(bounds)
        if out is not None:
            if out.shape != shape or out.dtype != self.dtype:
                raise ValueError(
                    f"out has {out.dtype.name}{list(out.shape)}; "
                    f"the box has {self.dtype.name}{list(shape)}"
                )
            if out.size:
                self._fill(bounds, out)
            return out
        if 0 in shape:
            return np.empty(shape, self.dtype)
        return dense(self._read(bounds))

    def panels(self, nbytes: int) -> Iterator[tuple[Box, np.ndarray[Any, Any]]]:
        """Reads the array in boxes of at most `nbytes` bytes, in C order.

        The concatenated bytes of the panels are those of the array.
        """
        for box in panel_boxes(self.shape, nbytes // max(1, self.dtype.itemsize)):
            yield box, self.read(box)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Reads the array, for `np.asarray`."""
        import numpy as np

        return np.array(self.read(), dtype, copy=copy)

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        """Reads a box that is not empty into an array of any strides."""
        raise NotImplementedError

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        """Reads a box that is not empty into a given array of any strides."""
        copy_into(out, self._read(box))

    # operations

    def transpose(self, axes: Sequence[int] | None = None) -> LazyArray:
        """Returns the array with its dimensions in another order, like `np.transpose`."""
        from fmapper.checkpoints.lazy_operations import Transpose

        wanted = tuple(range(self.ndim))[::-1] if axes is None else tuple(axes)
        order = tuple(self._axis(axis) for axis in wanted)
        if sorted(order) != list(range(self.ndim)):
            raise CheckpointError(
                f"axes {list(wanted)} are not a permutation of the axes of {_say(self)}"
            )
        if order == tuple(range(self.ndim)):
            return self
        if isinstance(self, Transpose):
            return self.operands[0].transpose([self.axes[axis] for axis in order])
        return Transpose(self, order)

    def reshape(self, shape: Sequence[int]) -> LazyArray:
        """Returns the elements in another shape, in C order; one size may be -1."""
        from fmapper.checkpoints.lazy_operations import Reshape

        sizes = list(shape)
        if sizes.count(-1) == 1:
            product = -math.prod(sizes)
            if not product or self.size % product:
                raise CheckpointError(f"{_say(self)} cannot be reshaped to {list(shape)}")
            sizes[sizes.index(-1)] = self.size // product
        wanted = _as_shape(sizes)
        if math.prod(wanted) != self.size:
            raise CheckpointError(f"{_say(self)} cannot be reshaped to {list(shape)}")
        if wanted == self.shape:
            return self
        if isinstance(self, Reshape):
            return self.operands[0].reshape(wanted)
        return Reshape(self, wanted)

    def slice(self, start: int, stop: int, axis: int = 0) -> LazyArray:
        """Returns a range of one dimension."""
        at = self._axis(axis)
        box = list(full_box(self.shape))
        box[at] = start, stop
        return self.part(box)

    def part(self, box: Ranges) -> LazyArray:
        """Returns a box of the array as a lazy array of its own."""
        from fmapper.checkpoints.lazy_operations import Part

        try:
            bounds = as_box(box, self.shape)
        except IndexError as error:
            raise CheckpointError(f"{_say(self)}: {error}") from None
        if bounds == full_box(self.shape):
            return self
        if isinstance(self, Part):
            pairs = zip(bounds, self.box, strict=True)
            bounds = tuple((start + low, start + high) for (low, high), (start, _) in pairs)
            return Part(self.operands[0], bounds)
        return Part(self, bounds)

    def split(self, sizes: int | Sequence[int], axis: int = 0) -> list[LazyArray]:
        """Splits a dimension into parts of the given sizes, or into a number of equal parts."""
        at = self._axis(axis)
        whole = self.shape[at]
        if isinstance(sizes, int):
            if sizes < 1 or whole % sizes:
                raise CheckpointError(
                    f"{_say(self)} cannot be split into {sizes} along axis {axis}"
                )
            sizes = [whole // sizes] * sizes
        if sum(sizes) != whole or min(sizes, default=0) < 0:
            raise CheckpointError(
                f"{_say(self)} cannot be split into parts of {list(sizes)} along axis {axis}"
            )
        stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [self.slice(stop - size, stop, at) for stop, size in zip(stops, sizes, strict=True)]

    def unstack(self, axis: int = 0) -> list[LazyArray]:
        """Returns the arrays along one dimension, without that dimension."""
        at = self._axis(axis)
        rest = (*self.shape[:at], *self.shape[at + 1 :])
        return [part.reshape(rest) for part in self.split([1] * self.shape[at], at)]

    def interleave(self, groups: int, axis: int = 0) -> LazyArray:
        """Interleaves the elements of equal parts of a dimension.

        `a0 a1 a2 b0 b1 b2` becomes `a0 b0 a1 b1 a2 b2` for 2 groups; 3 groups reverse that.

        Examples:
            >>> import numpy as np
            >>> LazyArray.of(np.arange(6)).interleave(2).read()
            array([0, 3, 1, 4, 2, 5])
        """
        at = self._axis(axis)
        size = self.shape[at]
        if groups < 1 or size % groups:
            raise CheckpointError(
                f"{_say(self)} cannot be split into {groups} equal parts along axis {axis}"
            )
        split = self.reshape((*self.shape[:at], groups, size // groups, *self.shape[at + 1 :]))
        axes = [*range(split.ndim)]
        axes[at], axes[at + 1] = at + 1, at
        return split.transpose(axes).reshape(self.shape)

    def astype(self, dtype: Any, name: str = "") -> LazyArray:
        """Casts floating and complex arrays; others stay as they are, as with a mover.

        Reading raises `LossyCastError` if a finite value would become infinite.

        Args:
            dtype: The dtype.
            name: The array's name, for that error.
        """
        from fmapper.checkpoints.lazy_operations import Cast

        return Cast.make(self, dtype, name)

    def plus(self, value: float) -> LazyArray:
        """Adds a number to each element, rounded to the dtype of the array."""
        from fmapper.checkpoints.lazy_operations import Offset

        return Offset(self, value)

    def times(self, factor: float, *, divide: bool = False) -> LazyArray:
        """Multiplies each element by a number, or divides it, rounded to the dtype of the array."""
        from fmapper.checkpoints.lazy_operations import Scale

        return Scale(self, factor, divide)

    def view(self, dtype: Any) -> LazyArray:
        """Reinterprets the bytes as another dtype, like `np.ndarray.view`.

        If the element sizes differ, the last dimension changes.
        """
        from fmapper.checkpoints.lazy_operations import View

        return View.make(self, dtype)

    def _axis(self, axis: int) -> int:
        """Returns the index of a dimension, counted from the front."""
        if not -self.ndim <= axis < self.ndim:
            raise CheckpointError(f"{_say(self)} has no axis {axis}")
        return axis % self.ndim


class Operation(LazyArray):
    """An array computed from the elements of its operands."""

    def __init__(self, operands: Iterable[LazyArray], shape: Sequence[int], dtype: Any) -> None:
        self.operands = tuple(operands)
        self.shape = tuple(shape)
        self.dtype = dtype
        self._depth = 1 + max(operand._depth for operand in self.operands)
        if self._depth > _DEEPEST:
            raise CheckpointError(f"more than {_DEEPEST} nested operations")

    @property
    def has_values(self) -> bool:
        """Returns whether its operands have values."""
        return all(operand.has_values for operand in self.operands)


class _InMemory(LazyArray):
    def __init__(self, array: Any) -> None:
        import numpy as np

        self._array = np.asarray(array)
        self.shape, self.dtype = self._array.shape, self._array.dtype

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        index: Any = (*box_slices(box), ...)  # returns an array, even without dimensions
        values: np.ndarray[Any, Any] = self._array[index]
        return values


def concatenate(arrays: Sequence[LazyArray], axis: int = 0) -> LazyArray:
    """Joins arrays along an existing dimension.

    Raises:
        CheckpointError: There are no arrays, or their dtypes or other dimensions differ.
    """
    from fmapper.checkpoints.lazy_operations import Concatenate

    if not arrays:
        raise CheckpointError("there is nothing to concatenate")
    first = arrays[0]
    at = first._axis(axis)
    for array in arrays:
        shape, others = list(array.shape), list(first.shape)
        if len(shape) == len(others):
            shape[at] = others[at] = 0
        if shape != others or array.dtype != first.dtype:
            raise CheckpointError(
                f"{_say(first)} and {_say(array)} cannot be concatenated along axis {axis}"
            )
    return first if len(arrays) == 1 else Concatenate(arrays, at)


def stack(arrays: Sequence[LazyArray], axis: int = 0) -> LazyArray:
    """Joins arrays of one shape along a new dimension.

    Raises:
        CheckpointError: There are no arrays, or their shapes or dtypes differ.
    """
    if not arrays:
        raise CheckpointError("there is nothing to stack")
    first = arrays[0]
    for array in arrays:
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            raise CheckpointError(f"{_say(first)} and {_say(array)} cannot be stacked")
    if not -first.ndim - 1 <= axis <= first.ndim:
        raise CheckpointError(f"a stack of {_say(first)} has no axis {axis}")
    at = axis % (first.ndim + 1)
    shape = (*first.shape[:at], 1, *first.shape[at:])
    return concatenate([array.reshape(shape) for array in arrays], at)


def add(arrays: Sequence[LazyArray]) -> LazyArray:
    """Adds arrays of one shape and dtype, each step rounded to that dtype.

    Raises:
        CheckpointError: Their shapes or dtypes differ.
    """
    from fmapper.checkpoints.lazy_operations import Sum

    terms = [*(arrays[0].operands if isinstance(arrays[0], Sum) else arrays[:1]), *arrays[1:]]
    return terms[0] if len(terms) == 1 else Sum(terms)


def is_narrow(array: LazyArray) -> bool:
    """Returns whether an array has floats of 8 bits or fewer, which usually have scales."""
    return array.dtype.name.startswith("float") and array.dtype.itemsize == 1


def _as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise CheckpointError(f"{list(sizes)} is not a shape")
    return sizes


def _say(array: LazyArray) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
