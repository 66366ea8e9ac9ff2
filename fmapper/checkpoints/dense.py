"""Copies between arrays of different memory order in tiles that fit the cache."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_ROWS = 256  # of a tile, along the dimension that is dense in the source
_COLUMNS = 128  # along the one that is dense in the target; twice as many bytes
_SMALL = 4096  # elements that fit into the nearest cache in any order


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

    `np.copyto` goes along one of the two arrays and touches a cache line of the other for each
    element: 0.25 GB/s for 16 bits. Tiles keep both in the cache, and squares of four elements
    take a quarter of the steps: three to five times the rate.
    """
    import numpy as np

    if target.dtype.itemsize in (1, 2, 4, 8):  # those of ml_dtypes have no quick loops
        plain = np.dtype(f"u{target.dtype.itemsize}")
        target, source = target.view(plain), source.view(plain)
    written, read = _dense_axis(target), _dense_axis(source)
    if written == read or target.size <= _SMALL:
        np.copyto(target, source)
        return
    plane = target.shape[written] * target.shape[read]
    others = [axis for axis in range(target.ndim) if axis not in (written, read)]
    if plane < _SMALL:  # a loop over the rest would take longer than what it saves
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
        copy = _Squares(target.dtype)
    width = _COLUMNS if size > 1 else 2 * _COLUMNS
    for i in range(0, rows, _ROWS):
        for j in range(0, columns, width):
            tile = slice(i, i + _ROWS), slice(j, j + width)
            copy(target[tile], source[tile])


class _Squares:
    """Copies squares of two by two elements at once, as wider integers.

    It has memory of its own, so that nothing is allocated for a tile, and the rows of the target,
    which may lie at the same places of the cache, are written one after the other.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        import numpy as np

        bits = 8 * dtype.itemsize
        self._wide = wide = np.dtype(f"u{2 * dtype.itemsize}")
        self._bits, self._low = wide.type(bits), wide.type((1 << bits) - 1)
        self._high = ~self._low
        self._tile = np.empty((_ROWS, 2 * _COLUMNS), dtype)
        self._parts = np.empty((2, _COLUMNS, _ROWS // 2), wide)

    def __call__(self, target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
        import numpy as np

        rows, columns = target.shape[0] // 2 * 2, target.shape[1] // 2 * 2
        turned, tile = source[:rows, :columns].T, self._tile[:rows, :columns]
        a, b = turned[0::2].view(self._wide), turned[1::2].view(self._wide)
        upper, lower = tile[0::2].view(self._wide), tile[1::2].view(self._wide)
        found, other = self._parts[:, : columns // 2, : rows // 2]
        np.left_shift(b, self._bits, out=found)
        np.bitwise_and(a, self._low, out=other)
        np.bitwise_or(found, other, out=found)
        upper[...] = found.T
        np.right_shift(a, self._bits, out=found)
        np.bitwise_and(b, self._high, out=other)
        np.bitwise_or(found, other, out=found)
        lower[...] = found.T
        target[:rows, :columns] = tile
        target[rows:] = source[rows:]
        target[:, columns:] = source[:, columns:]


def _dense_axis(array: np.ndarray[Any, Any]) -> int:
    """Returns the dimension with the smallest stride; the last one if there is none."""
    found, least = array.ndim - 1, 0
    for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        if size > 1 and (not least or abs(stride) <= least):
            found, least = axis, abs(stride)
    return found
