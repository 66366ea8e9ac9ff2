"""The operations on lazy arrays: each translates a box of its result into boxes of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fmapper.backends.arrays import HOST, Arrays
from fmapper.backends.discovery import get_adapter
from fmapper.backends.dtypes import dtype_name, is_inexact, wanted_dtype
from fmapper.checkpoints.boxes import Box, box_shape, flat_range, parts_of_box
from fmapper.checkpoints.dense import copy_into, dense
from fmapper.checkpoints.lazy import ByteRun, LazyArray, Operation
from fmapper.checkpoints.stored import BLOCK, StoredArray
from fmapper.errors import CheckpointError, LossyCastError
from fmapper.files.dtypes import numpy_dtype
from fmapper.programs.sizes import reshape_groups

if TYPE_CHECKING:
    import numpy as np


class Transpose(Operation):
    """Permutes the dimensions."""

    def __init__(self, array: LazyArray, axes: Sequence[int]) -> None:
        super().__init__([array], [array.shape[axis] for axis in axes], array.dtype)
        self.axes = tuple(axes)

    def byte_runs(self) -> list[ByteRun] | None:
        """Returns the runs of the operand, if only dimensions of size 1 have moved."""
        sizes = self.operands[0].shape
        moved = [axis for axis in self.axes if sizes[axis] != 1]
        return self.operands[0].byte_runs() if moved == sorted(moved) else None

    def inner(self, box: Box) -> Box:
        """Returns the box of the operand that a box is made of."""
        return tuple(box[self.axes.index(axis)] for axis in range(self.ndim))

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        return self.operands[0]._read(self.inner(box)).transpose(self.axes)

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        back = [self.axes.index(axis) for axis in range(self.ndim)]
        self.operands[0]._fill(self.inner(box), out.transpose(back))


class Part(Operation):
    """Takes a box of the operand."""

    def __init__(self, array: LazyArray, box: Box) -> None:
        super().__init__([array], box_shape(box), array.dtype)
        self.box = box

    def byte_runs(self) -> list[ByteRun] | None:
        """Returns a part of the operand's runs, if the box is contiguous."""
        bounds = flat_range(self.box, self.operands[0].shape)
        runs = self.operands[0].byte_runs()
        if bounds is None or runs is None:
            return None
        start, stop = (place * self.dtype.itemsize for place in bounds)
        return list(_cut(runs, start, stop))

    def inner(self, box: Box) -> Box:
        """Returns the box of the operand that a box is made of."""
        pairs = zip(box, self.box, strict=True)
        return tuple((begin + start, begin + stop) for (start, stop), (begin, _) in pairs)

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        return self.operands[0]._read(self.inner(box))

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        self.operands[0]._fill(self.inner(box), out)


def _cut(runs: list[ByteRun], start: int, stop: int) -> Iterator[ByteRun]:
    """Yields the part of consecutive runs that lies between two offsets."""
    begin = 0
    for run in runs:
        end = begin + run.stop - run.start
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield ByteRun(run.array, run.start + low - begin, run.start + high - begin)
        begin = end


class Concatenate(Operation):
    """Joins the operands along one dimension."""

    def __init__(self, arrays: Sequence[LazyArray], axis: int) -> None:
        shape = list(arrays[0].shape)
        shape[axis] = sum(array.shape[axis] for array in arrays)
        super().__init__(arrays, shape, arrays[0].dtype)
        self.along = axis

    def byte_runs(self) -> list[ByteRun] | None:
        """Returns the operands' runs in order, if the dimension is the first."""
        if math.prod(self.shape[: self.along]) != 1:
            return None
        merged: list[ByteRun] = []
        for array in self.operands:
            runs = array.byte_runs()
            if runs is None:
                return None
            for run in runs:
                last = merged[-1] if merged else None
                if last and last.array is run.array and last.stop == run.start:
                    merged[-1] = ByteRun(run.array, last.start, run.stop)
                else:
                    merged.append(run)
        return merged

    def parts(self, box: Box) -> Iterator[tuple[LazyArray, Box, tuple[slice, ...]]]:
        """Yields the operands, a box of each, and its place in the result."""
        low, high = box[self.along]
        begin = 0
        for array in self.operands:
            end = begin + array.shape[self.along]
            start, stop = max(low, begin), min(high, end)
            if start < stop:
                inner = list(box)
                inner[self.along] = start - begin, stop - begin
                place = [slice(None)] * self.ndim
                place[self.along] = slice(start - low, stop - low)
                yield array, tuple(inner), tuple(place)
            begin = end

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        import numpy as np

        parts = list(self.parts(box))
        if len(parts) == 1:
            return parts[0][0]._read(parts[0][1])
        out = np.empty(box_shape(box), self.dtype)
        self._fill(box, out)
        return out

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        for array, inner, place in self.parts(box):
            array._fill(inner, out[place])


_LEAST_PIECE = 4096  # bytes that are worth a separate read


class Reshape(Operation):
    """Splits and merges dimensions; a box is read as the smallest rows that cover it.

    If that would read more than twice as many elements, it is read in pieces, unless they are
    small.
    """

    def __init__(self, array: LazyArray, shape: Sequence[int]) -> None:
        super().__init__([array], shape, array.dtype)
        self.groups = reshape_groups(array.shape, self.shape)[0] if array.size else []

    def byte_runs(self) -> list[ByteRun] | None:
        """Returns the runs of the operand."""
        return self.operands[0].byte_runs()

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        import numpy as np
        from numpy.lib.stride_tricks import as_strided

        rows = list(self._rows(box))
        pieces = list(self._pieces(box, rows))
        if pieces:
            out = np.empty(box_shape(box), self.dtype)
            self._fill(box, out)
            return out
        array = self.operands[0]._read(tuple(bound for part in rows for bound in part.box))
        sizes = tuple(math.prod(box_shape(part.box)) for part in rows)
        flat = array if array.shape == sizes else dense(array).reshape(sizes)
        flat = flat[tuple(slice(part.skip, None) for part in rows)]
        pairs = zip(rows, flat.strides, strict=True)
        steps = [stride * step for part, step in pairs for stride in part.strides]
        plain = flat.view(f"V{flat.itemsize}")  # as_strided does not know float8_e5m2
        return as_strided(plain, box_shape(box), steps, writeable=False).view(flat.dtype)

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        rows = list(self._rows(box))
        pieces = list(self._pieces(box, rows))
        for piece, place in pieces:
            self._fill(piece, out[place])
        if pieces:
            return
        inner = tuple(bound for part in rows for bound in part.box)
        if math.prod(box_shape(inner)) == out.size:  # no further elements are read
            try:
                view = out.reshape(box_shape(inner), copy=False)
            except ValueError:  # its strides do not allow that
                pass
            else:
                self.operands[0]._fill(inner, view)
                return
        copy_into(out, self._read(box))

    def _pieces(self, box: Box, rows: list[_Rows]) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        """Yields parts of a box and their offsets, where a single read would include other rows."""
        wanted = math.prod(box_shape(box))
        if math.prod(math.prod(box_shape(part.box)) for part in rows) <= 2 * wanted:
            return
        wastes = [
            (math.prod(box_shape(part.box)) / math.prod(box_shape(box[new])), new)
            for part, (_, new) in zip(rows, self.groups, strict=True)
        ]
        _, new = max(wastes, key=lambda pair: pair[0])
        dims = [at for at in range(new.start, new.stop) if box[at][1] - box[at][0] > 1]
        if len(dims) < 2:
            return
        axis, (start, stop) = dims[0], box[dims[0]]
        if wanted * self.dtype.itemsize // (stop - start) < _LEAST_PIECE:
            return
        for at in range(start, stop):
            place = (*[slice(None)] * axis, slice(at - start, at - start + 1))
            yield (*box[:axis], (at, at + 1), *box[axis + 1 :]), place

    def _rows(self, box: Box) -> Iterator[_Rows]:
        """Yields, group by group, the box of the operand to read."""
        for before, new in self.groups:
            sizes, old = self.shape[new], self.operands[0].shape[before]
            strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
            pairs = list(zip(box[new], strides, strict=True))
            low = sum(start * stride for (start, _), stride in pairs)
            high = sum((stop - 1) * stride for (_, stop), stride in pairs)
            cover = _cover(low, high, old)
            skip = low - _flat([start for start, _ in cover], old)
            yield _Rows(tuple(cover), skip, strides)


class _Rows(NamedTuple):
    """The rows that a reshape reads for one group of dimensions.

    Attributes:
        box: The range of each of the operand's dimensions.
        skip: The number of elements in the box before the first requested one.
        strides: The step in elements for each dimension of the result.
    """

    box: Box
    skip: int
    strides: list[int]


def _cover(low: int, high: int, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the smallest box that holds a range of elements in C order."""
    box: list[tuple[int, int]] = []
    row = math.prod(shape)
    differ = False
    for size in shape:
        row //= size
        first, last = low // row % size, high // row % size
        box.append((0, size) if differ else (first, last + 1))
        differ = differ or first != last
    return box


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    place = 0
    for at, size in zip(index, shape, strict=True):
        place = place * size + at
    return place


class Cast(Operation):
    """Casts like movers."""

    def __init__(self, array: LazyArray, dtype: Any, name: str) -> None:
        super().__init__([array], array.shape, dtype)
        self.name = name

    @staticmethod
    def make(array: LazyArray, dtype: Any, name: str) -> LazyArray:
        """Returns the array in the dtype that a mover would give it, or the array itself."""
        try:
            wanted = numpy_dtype(wanted_dtype(array.dtype.name, dtype_name(dtype)))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        return Cast._inside(array, wanted, name)

    @staticmethod
    def _inside(array: LazyArray, dtype: Any, name: str) -> LazyArray:
        """Casts before operations that only move elements: blocks are cast as they are read."""
        if array.dtype == dtype:
            return array
        if isinstance(array, Transpose | Part | Concatenate | Reshape):
            operands = [Cast._inside(operand, dtype, name) for operand in array.operands]
            if isinstance(array, Transpose):
                return Transpose(operands[0], array.axes)
            if isinstance(array, Part):
                return Part(operands[0], array.box)
            if isinstance(array, Reshape):
                return Reshape(operands[0], array.shape)
            return Concatenate(operands, array.along)
        return Cast(array, dtype, name)

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        if not isinstance(self.operands[0], StoredArray):
            super()._fill(box, out)
            return
        for part, place in parts_of_box(box, BLOCK // self.dtype.itemsize):
            copy_into(out[place], self._read(part))

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        array = self.operands[0]
        new, survived = get_adapter(HOST.backend, Arrays).cast(array._read(box), self.dtype.name)
        if not survived:
            raise LossyCastError(
                f"{f'{self.name}: ' if self.name else ''}finite values become infinite going from "
                f"{array.dtype.name} to {self.dtype.name}. Scale the values, or keep a wider dtype."
            )
        values: np.ndarray[Any, Any] = new
        return values


class Sum(Operation):
    """Adds operands of one shape and dtype, each step rounded to that dtype."""

    def __init__(self, arrays: Sequence[LazyArray]) -> None:
        super().__init__(arrays, arrays[0].shape, arrays[0].dtype)
        outlines = {(array.shape, array.dtype) for array in arrays}
        if len(outlines) > 1 or self.dtype.kind == "b":
            shown = ", ".join(repr(array) for array in arrays)
            raise CheckpointError(f"arrays of other shapes or dtypes cannot be added: {shown}")

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        total = self.operands[0]._read(box)
        for array in self.operands[1:]:
            total = total + array._read(box)
        return total


class Offset(Operation):
    """Adds a number to each element, rounded to the dtype of the array."""

    def __init__(self, array: LazyArray, value: float) -> None:
        super().__init__([array], array.shape, array.dtype)
        self.value = value
        check_number(array, value)

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = self.operands[0]._read(box) + self.dtype.type(self.value)
        return values


class Scale(Operation):
    """Multiplies or divides each element by a number, rounded to the dtype of the array."""

    def __init__(self, array: LazyArray, factor: float, divide: bool = False) -> None:
        super().__init__([array], array.shape, array.dtype)
        self.factor, self.divide = factor, divide
        check_number(array, factor)
        if divide and (not factor or not is_inexact(array.dtype.name)):
            raise CheckpointError(f"{array} cannot be divided by {factor!r}")

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        array, factor = self.operands[0]._read(box), self.dtype.type(self.factor)
        values: np.ndarray[Any, Any] = array / factor if self.divide else array * factor
        return values


def check_number(array: LazyArray, value: float) -> None:
    """Raises unless a number can be combined with the elements of an array in its dtype."""
    is_float = is_inexact(array.dtype.name)
    if not (is_float and math.isfinite(value)) and not (
        array.dtype.kind in "iu" and int(value) == value
    ):
        raise CheckpointError(f"{value!r} cannot be combined with elements of {array.dtype.name}")


class View(Operation):
    """Reinterprets the bytes of the operand as another dtype."""

    @staticmethod
    def make(array: LazyArray, dtype: Any) -> LazyArray:
        """Returns the array in the new dtype; itself if it has it already.

        Raises:
            CheckpointError: The last dimension does not consist of whole elements of the dtype.
        """
        import numpy as np

        wanted = numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
        if wanted == array.dtype:
            return array
        shape = list(array.shape)
        if wanted.itemsize != array.dtype.itemsize:
            last = shape[-1] * array.dtype.itemsize if shape else 0
            if not shape or last % wanted.itemsize:
                raise CheckpointError(
                    f"{array.dtype.name}{shape} does not consist of whole elements of {wanted.name}"
                )
            shape[-1] = last // wanted.itemsize
        return View([array], shape, wanted)

    def byte_runs(self) -> list[ByteRun] | None:
        """Returns the runs of the operand."""
        return self.operands[0].byte_runs()

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        array = self.operands[0]
        old, new = array.dtype.itemsize, self.dtype.itemsize
        if old == new:
            return array._read(box).view(self.dtype)
        start, stop = (place * new for place in box[-1])
        inner = (*box[:-1], (start // old, -(-stop // old)))
        viewed = dense(array._read(inner)).view(self.dtype)
        skip = start % old // new
        return viewed[..., skip : skip + box[-1][1] - box[-1][0]]

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        if self.operands[0].dtype.itemsize == self.dtype.itemsize:
            self.operands[0]._fill(box, out.view(self.operands[0].dtype))
        else:
            copy_into(out, self._read(box))


# Operations -> how they are computed in a namespace. Casts are left to the caller, who knows what
# becomes of values that do not fit.
Step: TypeAlias = Cast | Offset | Scale
EACH = (Cast, Offset, Scale)  # what is done to each element by itself
MOVES = (Concatenate, Part, Reshape, Transpose)  # what only moves elements

COMPUTED: dict[type, Callable[..., Any]] = {
    Transpose: lambda xp, op, x: xp.permute_dims(x, tuple(op.axes)),
    Reshape: lambda xp, op, x: xp.reshape(x, op.shape),
    Part: lambda xp, op, x: x[tuple(slice(*bounds) for bounds in op.box)],
    Concatenate: lambda xp, op, *parts: xp.concat(parts, axis=op.along),
    Scale: lambda xp, op, x: x / op.factor if op.divide else x * op.factor,
    Offset: lambda xp, op, x: x + op.value,
    Sum: lambda xp, op, *parts: sum(parts[1:], parts[0]),
}


def compute(
    array: LazyArray,
    value: Callable[[Any], Any],
    others: Callable[[Operation, list[Any]], Any],
) -> Any:
    """Computes a lazy array with arrays of any framework, also under `jit`.

    Args:
        array: The array.
        value: Returns the value of an array that is not an operation.
        others: Computes an operation that is not in `COMPUTED` from its operands.
    """
    from fmapper.backends.namespace import array_namespace

    if not isinstance(array, Operation):
        return value(array)
    operands = [compute(operand, value, others) for operand in array.operands]
    if type(array) not in COMPUTED:
        return others(array, operands)
    return COMPUTED[type(array)](array_namespace(operands), array, *operands)
