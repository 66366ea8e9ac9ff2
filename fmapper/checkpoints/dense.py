"""Copies between arrays of different memory order in tiles that fit the cache."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_ROWS = 256  # of a tile, along the dimension that is contiguous in the source
_COLUMNS = 128  # along the one that is contiguous in the target
_SMALL = 4096  # elements that fit into the first-level cache in any order
_MOST_KEPT = 32 << 20  # bytes of a buffer that a thread keeps


class _Kept(threading.local):
    """The unused buffers of a thread."""

    def __init__(self) -> None:
        self.buffers: list[np.ndarray[Any, Any]] = []
        self.squares: dict[int, _Squares] = {}


_kept = _Kept()


@contextmanager
def scratch(shape: Sequence[int], dtype: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Lends an uninitialised array in C order, for as long as the block runs.

    Each thread keeps the memory for the next time: mapping new pages takes longer than reading a
    cached file.
    """
    import numpy as np

    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffers = _kept.buffers
    buffer = buffers.pop() if buffers else np.empty(0, np.uint8)
    if buffer.nbytes < nbytes:
        del buffer  # before its successor is allocated
        buffer = np.empty(nbytes, np.uint8)
    try:
        yield buffer[:nbytes].view(dtype).reshape(shape)
    finally:
        if buffer.nbytes <= _MOST_KEPT:
            buffers.append(buffer)


def dense(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns an array in C order: itself, or a copy made in tiles."""
    import numpy as np

    if array.flags.c_contiguous:
        return array
    new = np.empty(array.shape, array.dtype)
    copy_into(new, array)
    return new


def copy_into(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copies an array into another of its shape and dtype, in tiles where their orders differ.

    `np.copyto` runs along one of the two arrays and touches a cache line of the other for each
    element: 0.25 GB/s for 16 bits. Tiles keep both in the cache, and squares of four elements need
    a quarter of the steps: three to five times the rate.
    """
    import numpy as np

    if target.size <= _SMALL and target.dtype.isbuiltin == 1:
        np.copyto(target, source)
        return
    if target.dtype.itemsize in (1, 2, 4, 8):  # dtypes of ml_dtypes have no fast loops
        plain = np.dtype(f"u{target.dtype.itemsize}")
        target, source = target.view(plain), source.view(plain)
    if target.size <= _SMALL or (written := _dense_axis(target)) == (read := _dense_axis(source)):
        np.copyto(target, source)
        return
    plane = target.shape[written] * target.shape[read]
    others = [axis for axis in range(target.ndim) if axis not in (written, read)]
    if plane < _SMALL:  # a loop over the other dimensions would take longer than it saves
        np.copyto(target, source)
        return
    order = (*others, read, written)
    target, source = target.transpose(order), source.transpose(order)
    for index in itertools.product(*(range(target.shape[axis]) for axis in range(len(others)))):
        _copy_plane(target[index], source[index])


def _copy_plane(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copies a matrix from column-major to row-major order."""
    import numpy as np

    rows, columns = target.shape
    size = target.dtype.itemsize
    is_dense = target.strides[1] == source.strides[0] == size
    copy: Any = np.copyto
    if size in (1, 2, 4) and is_dense and sys.byteorder == "little":
        copy = _kept.squares.get(size) or _kept.squares.setdefault(size, _Squares(size))
    width = _COLUMNS if size > 1 else 2 * _COLUMNS
    for i in range(0, rows, _ROWS):
        for j in range(0, columns, width):
            tile = slice(i, i + _ROWS), slice(j, j + width)
            copy(target[tile], source[tile])


class _Squares:
    """Copies squares of two by two elements at once, as wider integers.

    It has memory of its own, so that nothing is allocated per tile, and the rows of the target,
    which may map to the same cache lines, are written one after the other.
    """

    def __init__(self, itemsize: int) -> None:
        import numpy as np

        bits = 8 * itemsize
        self._dtype, self._wide = np.dtype(f"u{itemsize}"), np.dtype(f"u{2 * itemsize}")
        self._bits = self._wide.type(bits)
        self._low = self._wide.type((1 << bits) - 1)
        self._high = ~self._low
        self._shape = (0, 0)

    def __call__(self, target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
        import numpy as np

        rows, columns = target.shape
        if rows % 2 or columns % 2:
            rows, columns = rows // 2 * 2, columns // 2 * 2
            target[rows:] = source[rows:]
            target[:, columns:] = source[:, columns:]
            target, source = target[:rows, :columns], source[:rows, :columns]
        if self._shape != (rows, columns):
            self._resize(rows, columns)
        turned = source.T
        a, b = turned[0::2].view(self._wide), turned[1::2].view(self._wide)
        joined, other = self._found, self._other
        np.left_shift(b, self._bits, out=joined)
        np.bitwise_and(a, self._low, out=other)
        np.bitwise_or(joined, other, out=joined)
        self._upper[...] = self._turned
        np.right_shift(a, self._bits, out=joined)
        np.bitwise_and(b, self._high, out=other)
        np.bitwise_or(joined, other, out=joined)
        self._lower[...] = self._turned
        target[...] = self._tile

    def _resize(self, rows: int, columns: int) -> None:
        import numpy as np

        self._shape = rows, columns
        self._tile = np.empty((rows, columns), self._dtype)
        self._upper = self._tile[0::2].view(self._wide)
        self._lower = self._tile[1::2].view(self._wide)
        self._found, self._other = np.empty((2, columns // 2, rows // 2), self._wide)
        self._turned = self._found.T


def _dense_axis(array: np.ndarray[Any, Any]) -> int:
    """Returns the dimension with the smallest stride; the last one if there is none."""
    densest, least = array.ndim - 1, 0
    for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        if size > 1 and (not least or abs(stride) <= least):
            densest, least = axis, abs(stride)
    return densest
