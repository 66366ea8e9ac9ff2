"""Dequantising as an operation on lazy arrays: boxes end where blocks of the format do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fmapper.checkpoints.boxes import Box, box_slices
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

Arrays = list[Any]


class Dequantize(Operation):
    """Computes values from those of operands, some whole blocks at a time.

    Attributes:
        grain: For each dimension, the elements that are only read together.
    """

    grain: tuple[int, ...]

    def _operand_boxes(self, box: Box) -> Sequence[Box]:
        """Returns what is needed of each operand for a box that ends where blocks do."""
        raise NotImplementedError

    def _values(self, arrays: Arrays, box: Box) -> np.ndarray[Any, Any]:
        """Returns the values of a box from those parts of the operands."""
        raise NotImplementedError

    def _read(self, box: Box) -> np.ndarray[Any, Any]:
        whole = tuple(
            (start // grain * grain, min(-(-stop // grain) * grain, size))
            for (start, stop), grain, size in zip(box, self.grain, self.shape, strict=True)
        )
        boxes = self._operand_boxes(whole)
        arrays = [one._read(part) for one, part in zip(self.operands, boxes, strict=True)]
        found = self._values(arrays, whole)
        pairs = zip(box, whole, strict=True)
        inner = tuple((start - begin, stop - begin) for (start, stop), (begin, _) in pairs)
        return found[box_slices(inner)]


def expect(array: LazyArray, what: str, ndim: int | None, dtypes: Sequence[str]) -> None:
    """Checks the dimensions and dtype of a part.

    Raises:
        CheckpointError: They are others.
    """
    if array.dtype.name not in dtypes or (ndim is not None and array.ndim != ndim):
        dims = "" if ndim is None else f" of {ndim} dimensions"
        raise CheckpointError(
            f"{what} are {array.dtype.name}{list(array.shape)}, and not {' or '.join(dtypes)}{dims}"
        )


def expect_shape(array: LazyArray, what: str, shape: Sequence[int]) -> None:
    """Checks the shape of a part.

    Raises:
        CheckpointError: It is another.
    """
    if array.shape != tuple(shape):
        raise CheckpointError(f"{what} have the shape {list(array.shape)}, and not {list(shape)}")
