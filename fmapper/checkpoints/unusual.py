"""Arrays that are not stored in C order in the byte order of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmapper.checkpoints.boxes import Box, box_shape
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import CheckpointError
from fmapper.files.untrusted import show


class UnreadableArray(LazyArray):
    """An array with a known shape whose values cannot be read.

    The other arrays of the file can be read; reading this one raises an error.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        reason: The message of the error, with the name of the array.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, reason: str) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._reason = reason

    @classmethod
    def of_unknown(
        cls, path: object, name: str, shape: Sequence[int], dtype: str
    ) -> UnreadableArray:
        """Returns an array of an unknown dtype, which is treated as bytes."""
        import numpy as np

        reason = f"{path}: {show(name)}: has the unknown dtype {show(dtype)}, and is not read"
        return cls(shape, np.dtype("V1"), reason)

    def astype(self, dtype: Any, name: str = "") -> LazyArray:
        """Returns the array itself, since reading it raises anyway."""
        return self

    def _read(self, box: Box) -> Any:
        raise CheckpointError(self._reason)


class SwappedArray(LazyArray):
    """An array whose elements are stored in the opposite byte order.

    Args:
        stored: The stored array, read as little-endian.
    """

    def __init__(self, stored: LazyArray) -> None:
        self.shape, self.dtype = stored.shape, stored.dtype
        self._stored = stored

    def _read(self, box: Box) -> Any:
        import numpy as np

        values = np.empty(box_shape(box), self.dtype)
        self._stored.read(box, values)
        size = self.dtype.itemsize // (2 if self.dtype.kind == "c" else 1)
        values.reshape(-1).view(f"u{size}").byteswap(inplace=True)
        return values


class StridedArray(LazyArray):
    """A view of a one-dimensional array with any strides, so that elements may repeat.

    Args:
        base: The array that it is a view of.
        shape: Its shape.
        strides: The steps in the base, in elements; none is negative.
    """

    def __init__(self, base: LazyArray, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.shape, self.dtype = tuple(shape), base.dtype
        self._base, self._strides = base, tuple(strides)

    def _read(self, box: Box) -> Any:
        from numpy.lib.stride_tricks import as_strided

        first = sum(low * step for (low, _), step in zip(box, self._strides, strict=True))
        last = sum((high - 1) * step for (_, high), step in zip(box, self._strides, strict=True))
        run = self._base.read(((first, last + 1),))
        steps = [step * self.dtype.itemsize for step in self._strides]
        plain = run.view(f"V{run.itemsize}")  # as_strided does not know float8_e5m2
        return as_strided(plain, box_shape(box), steps, writeable=False).view(run.dtype)


class ConjugateArray(LazyArray):
    """The complex conjugate of an array, its negative, or both.

    Args:
        stored: The array.
        conjugate: Whether to take the conjugate.
        negative: Whether to change the sign.
    """

    def __init__(self, stored: LazyArray, *, conjugate: bool, negative: bool) -> None:
        self.shape, self.dtype = stored.shape, stored.dtype
        self._stored, self._conjugate, self._negative = stored, conjugate, negative

    def _read(self, box: Box) -> Any:
        values = self._stored.read(box)
        values = values.conj() if self._conjugate else values
        return -values if self._negative else values
