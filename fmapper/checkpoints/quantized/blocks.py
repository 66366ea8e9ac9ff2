"""Dequantisation as an operation on lazy arrays, in boxes that are aligned to blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fmapper.checkpoints.boxes import Box, box_shape, box_slices
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

Arrays = list[Any]
_PART = 1 << 17  # elements that are computed at a time


class Dequantize(Operation):
    """Computes values from those of its operands, in whole blocks.

    Attributes:
        grain: For each dimension, the number of elements that must be read together.
    """

    grain: tuple[int, ...]

    def _operand_boxes(self, box: Box) -> Sequence[Box]:
        """Returns the box of each operand for a box that is aligned to blocks."""
        raise NotImplementedError

    def _values(self, arrays: Arrays, box: Box) -> np.ndarray[Any, Any]:
        """Computes the values of a box from the parts of the operands."""
        raise NotImplementedError

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        import numpy as np

        if math.prod(box_shape(box)) <= _PART:
            return self._part(box)
        out = np.empty(box_shape(box), self.dtype)
        self._fill(box, out)
        return out

    def _fill(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        """Computes a few rows at a time, so that they stay in the cache."""
        shape = box_shape(box)
        axis = next((at for at, size in enumerate(shape) if size > 1), 0)
        row = math.prod(shape[axis + 1 :])
        if math.prod(shape) <= _PART or row == 0:
            out[...] = self._part(box)
            return
        (begin, end), grain = box[axis], self.grain[axis]
        rows = max(1, _PART // row // grain) * grain
        place = [slice(None)] * len(shape)
        start = begin
        while start < end:
            stop = min(end, (start + rows) // grain * grain)
            place[axis] = slice(start - begin, stop - begin)
            out[tuple(place)] = self._part((*box[:axis], (start, stop), *box[axis + 1 :]))
            start = stop

    def _part(self, box: Box) -> np.ndarray[Any, Any]:
        whole = tuple(
            (start // grain * grain, min(-(-stop // grain) * grain, size))
            for (start, stop), grain, size in zip(box, self.grain, self.shape, strict=True)
        )
        boxes = self._operand_boxes(whole)
        arrays = [operand._read(part) for operand, part in zip(self.operands, boxes, strict=True)]
        values = self._values(arrays, whole)
        pairs = zip(box, whole, strict=True)
        inner = tuple((start - begin, stop - begin) for (start, stop), (begin, _) in pairs)
        return values[box_slices(inner)]


def expect(array: LazyArray, what: str, ndim: int | None, dtypes: Sequence[str]) -> None:
    """Checks the dimensions and dtype of a part.

    Raises:
        CheckpointError: They differ.
    """
    if array.dtype.name not in dtypes or (ndim is not None and array.ndim != ndim):
        dims = "" if ndim is None else f" of {ndim} dimensions"
        raise CheckpointError(
            f"{what} are {array.dtype.name}{list(array.shape)}, not {' or '.join(dtypes)}{dims}"
        )


def expect_shape(array: LazyArray, what: str, shape: Sequence[int]) -> None:
    """Checks the shape of a part.

    Raises:
        CheckpointError: It differs.
    """
    if array.shape != tuple(shape):
        raise CheckpointError(f"{what} have shape {list(array.shape)}, not {list(shape)}")
