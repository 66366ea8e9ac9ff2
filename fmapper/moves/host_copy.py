"""Copies and buffers in host memory, filled by several threads if one is too slow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from fmapper.errors import BatchError
from fmapper.machine import threads_for_memory

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

C = TypeVar("C", bound=tuple[Any, ...])
ALIGNMENT = 64  # bytes; XLA takes over host memory only from such addresses
_SMALL = 32 << 10  # smaller arrays get memory of their own from the allocator
_SLAB = 32 << 20  # larger arrays share blocks of this size, which the system backs with huge pages
_PIECE = 8 << 20  # bytes that one thread copies at a time
_PARALLEL = 4 << 20  # below this a thread costs more than it gains

_nbytes = attrgetter("nbytes")


def host_copies(arrays: Sequence[Array], *, order: Literal["K", "C"] = "K") -> list[Array]:
    """Copies NumPy arrays into private memory.

    Large arrays begin at multiples of 64 bytes, and several may share one block of 32 MiB, which
    lives as long as any of them: the first access to memory in small portions takes longer than the
    copy.

    Args:
        arrays: NumPy arrays in native byte order, of any layout.
        order: `K` keeps the order of the axes in memory, `C` makes it row by row.

    Raises:
        BatchError: There is not enough memory for an array.
    """
    sizes = list(map(_nbytes, arrays))
    if max(sizes, default=0) < _SMALL:
        return [a.copy(order) for a in arrays]
    results: list[Any] = [
        None if size >= _SMALL else a.copy(order) for size, a in zip(sizes, arrays, strict=True)
    ]
    large = [k for k, new in enumerate(results) if new is None]
    places = _places([arrays[k] for k in large])
    for k in large:
        try:
            results[k] = _array_in(arrays[k], order, *next(places))
        except MemoryError as error:
            raise BatchError(k) from error
    copy_all([_as_numbers(results[k], arrays[k]) for k in large], _copy)
    return results


def host_buffers(wanted: Sequence[tuple[tuple[int, ...], Any]]) -> list[Array]:
    """Allocates arrays of the given shapes and dtypes, in memory like that of `host_copies`.

    The memory does not ask for huge pages, unlike NumPy's: `populate` decides on them.
    """
    import numpy as np

    shapes = [np.broadcast_to(np.empty((), dtype), shape) for shape, dtype in wanted]
    return [
        np.ndarray(like.shape, like.dtype, *place)
        for like, place in zip(shapes, _places(shapes, _mapped_block), strict=True)
    ]


def _places(
    arrays: Sequence[Array], new_block: Callable[[int], Array] | None = None
) -> Iterator[tuple[Array, int]]:
    """Yields the block and the offset of the copy of each array."""
    left = sum(_pad(a) for a in arrays)
    block, at = None, 0
    for a in arrays:
        size = _pad(a)
        if block is None or at + size > block.nbytes:
            block, at = (new_block or _aligned_block)(max(size, min(left, _SLAB))), 0
        yield block, at
        at += size
        left -= size


def _pad(a: Array) -> int:
    return -(-int(a.nbytes) // ALIGNMENT) * ALIGNMENT


def _aligned_block(size: int) -> Array:
    import numpy as np

    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def _mapped_block(size: int) -> Array:
    import mmap

    import numpy as np

    if not hasattr(mmap, "MAP_PRIVATE"):  # on Windows
        return _aligned_block(size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, max(size, 1), flags), np.uint8)


def _array_in(a: Array, order: str, block: Array, at: int) -> Array:
    """Returns an uninitialised array like `a` in a block of memory."""
    import numpy as np

    if order == "C" or a.flags.c_contiguous:
        return np.ndarray(a.shape, a.dtype, block, at)
    if a.flags.f_contiguous:
        return np.ndarray(a.shape, a.dtype, block, at, order="F")
    axes = sorted(range(a.ndim), key=lambda axis: -abs(a.strides[axis]))
    dense: Array = np.ndarray([a.shape[axis] for axis in axes], a.dtype, block, at)
    return dense.transpose(sorted(range(a.ndim), key=axes.__getitem__))


def copy_all(copies: Sequence[C], carry_out: Callable[[Sequence[C]], object]) -> None:
    """Copies arrays, on several threads if they are large.

    Args:
        copies: Tuples that begin with the array to write and the one to read.
        carry_out: Executes some of the copies one after the other; large ones are split.
    """
    size = sum(to.nbytes for to, *_ in copies)
    threads = min(threads_for_memory(), math.ceil(size / _PIECE))
    if size < _PARALLEL or threads == 1:
        carry_out(copies)
        return
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(carry_out, _bundles(copies)))
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        carry_out(copies)


def _copy(pairs: Sequence[tuple[Any, ...]]) -> None:
    import numpy as np

    for to, source in pairs:
        np.copyto(to, source)


def _bundles(copies: Sequence[C]) -> Iterator[list[C]]:
    """Groups the copies into bundles of about the size of one piece."""
    bundle: list[C] = []
    size = 0
    for copy in copies:
        for part in _pieces(copy) if copy[0].nbytes > _PIECE else (copy,):
            bundle.append(part)
            size += part[0].nbytes
            if size >= _PIECE:
                yield bundle
                bundle, size = [], 0
    if bundle:
        yield bundle


def _as_numbers(to: Array, source: Array) -> tuple[Array, Array]:
    """Views bytes as integers: NumPy holds the GIL while it copies types it does not know."""
    if source.dtype.isbuiltin == 1 or to.dtype != source.dtype:
        return to, source
    word = f"u{to.dtype.itemsize}"
    return to.view(word), source.view(word)


def _pieces(copy: C) -> Iterator[C]:
    """Divides a copy along the axis with the longest steps."""
    to, source, *more = copy
    n = math.ceil(to.nbytes / _PIECE)
    if n <= 1:
        yield copy
        return
    if to.flags.c_contiguous and source.flags.c_contiguous:
        to, source = to.reshape(-1), source.reshape(-1)
    elif to.flags.f_contiguous and source.flags.f_contiguous:
        to, source = to.reshape(-1, order="F"), source.reshape(-1, order="F")
    axis = max((axis for axis in range(to.ndim) if to.shape[axis] > 1), key=to.strides.__getitem__)
    step = math.ceil(to.shape[axis] / n)
    before = (slice(None),) * axis
    for start in range(0, to.shape[axis], step):
        at = (*before, slice(start, start + step))
        yield cast(C, (to[at], source[at], *more))
