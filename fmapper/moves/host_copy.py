"""Copies and buffers in host memory, filled by several threads if one is too slow."""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from fmapper.errors import BatchError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

C = TypeVar("C", bound=tuple[Any, ...])
ALIGNMENT = 64  # bytes; XLA takes over host memory only from such addresses
_SMALL = 32 << 10  # smaller arrays get memory of their own from the allocator
_SLAB = 32 << 20  # larger arrays share blocks of this size, which the system backs with huge pages
_PIECE = 8 << 20  # bytes that one thread copies at a time
_PARALLEL = 4 << 20  # below this a thread costs more than it gains
_MAX_THREADS = 8  # more do not use more of the memory's bandwidth
# Arguments of Linux's `madvise`. Python has no name for the last, which needs Linux 5.14.
_HUGE, _NOT_HUGE, _POPULATE_WRITE = 14, 15, 23
_HUGE_PAGE = 2 << 20  # bytes
_AT_HAND = 2e9  # bytes a second; small pages are mapped at 3e9, huge ones at 15e9, or at 0.4e9
_FIRST_PAUSE, _LONGEST_PAUSE = 64 << 20, 1 << 30  # bytes of small pages before the next attempt

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


class HugePages:
    """Decides whether to map huge pages, by how long the last ones took.

    They are five times as fast as small ones, except on a virtual machine that returns free memory
    to its host: there the host has to provide them again, at an eighth of the speed, while small
    pages come from the memory that the machine has kept. After a slow one, small pages are used for
    a while, twice as long each time.
    """

    def __init__(self) -> None:
        self.skip = 0  # bytes to map in small pages before huge ones are tried again
        self.pause = _FIRST_PAUSE

    def are_due(self, nbytes: int) -> bool:
        """Returns whether to map the next bytes in huge pages; if not, they count as skipped."""
        if self.skip <= 0:
            return True
        self.skip -= nbytes
        return False

    def came(self, nbytes: int, seconds: float) -> bool:
        """Records how long huge pages took; returns whether to continue with them."""
        if nbytes >= _AT_HAND * seconds:
            self.pause = _FIRST_PAUSE
            return True
        self.skip = self.pause
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        return False


_huge_pages = HugePages()


def populate(part: Array, of: Array | None = None, huge: HugePages = _huge_pages) -> None:
    """Asks the system to map the pages of an array at once, before they are written.

    Mapping them one by one on the first write makes reading a file a fifth slower.

    Args:
        part: The array that is written next, in C order.
        of: The new array that contains `part`; huge pages may reach beyond the piece, but not
            beyond this array. `part` itself if None.
        huge: The policy for huge pages.
    """
    advise = _madvise()
    if advise is None or part.nbytes < _SMALL:
        return
    import mmap

    start, stop = _bounds(part)
    low, high = (start, stop) if of is None else _bounds(of)
    first = max(start // _HUGE_PAGE, -(-low // _HUGE_PAGE)) * _HUGE_PAGE
    last = min(-(-stop // _HUGE_PAGE), high // _HUGE_PAGE) * _HUGE_PAGE
    if first < last and huge.are_due(last - first):
        _populate_huge(advise, first, last, huge)
    start = start // mmap.PAGESIZE * mmap.PAGESIZE
    advise(start, stop - start, _POPULATE_WRITE)  # older systems refuse, which does no harm


def _populate_huge(
    advise: Callable[[int, int, int], int], first: int, last: int, huge: HugePages
) -> None:
    """Maps huge pages one by one, until one is slow; the rest are small pages."""
    if advise(first, last - first, _HUGE):
        return
    for start in range(first, last, _HUGE_PAGE):
        began = time.perf_counter()
        if advise(start, _HUGE_PAGE, _POPULATE_WRITE):
            return
        if not huge.came(_HUGE_PAGE, time.perf_counter() - began):
            if start + _HUGE_PAGE < last:
                advise(start + _HUGE_PAGE, last - start - _HUGE_PAGE, _NOT_HUGE)
            return


def _bounds(array: Array) -> tuple[int, int]:
    start = array.ctypes.data
    return start, start + array.nbytes


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Returns `madvise` of the C library, because Python's holds the GIL."""
    if sys.platform != "linux":
        return None
    import ctypes

    try:
        call = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):  # linked statically
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


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


def threads_for_memory() -> int:
    """Returns how many threads to use for memory: one per core of this process, up to 8."""
    if hasattr(os, "sched_getaffinity"):  # not available on macOS and Windows
        return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    return min(_MAX_THREADS, os.cpu_count() or 1)


def _copy(pairs: Sequence[tuple[Any, ...]]) -> None:
    import numpy as np

    for to, source in pairs:
        np.copyto(to, source)


def _bundles(copies: Sequence[C]) -> Iterator[list[C]]:
    """Groups the copies into bundles of about the size of one piece."""
    bundle: list[C] = []
    size = 0
    for copy in copies:
        for part in _pieces(copy):
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
