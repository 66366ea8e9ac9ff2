"""The host: its processor, and its memory."""

from __future__ import annotations

import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_MAX_THREADS = 8  # more do not use more of the memory's bandwidth
_SMALL = 32 << 10  # bytes of pages that are not worth a call
# Arguments of Linux's `madvise`. Python has no name for the last, which needs Linux 5.14.
_HUGE, _NOT_HUGE, _POPULATE_WRITE = 14, 15, 23
_HUGE_PAGE = 2 << 20  # bytes
_AT_HAND = 2e9  # bytes a second; small pages are mapped at 3e9, huge ones at 15e9, or at 0.4e9
_FIRST_PAUSE, _LONGEST_PAUSE = 64 << 20, 1 << 30  # bytes of small pages before the next attempt
_ROOT = Path("/")


def processor_name(root: Path = _ROOT) -> str:
    """Returns the model name of the processor, or its architecture."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def host_memory(root: Path = _ROOT) -> tuple[int | None, int | None]:
    """Returns how many bytes of memory this process can use in total, and how many are free.

    Both are those of the machine, unless the tightest control group of this process allows less: a
    container is stopped at its own limit.

    Args:
        root: The root of the file system.
    """
    fields = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    total, free = _kibibytes(fields.get("MemTotal")), _kibibytes(fields.get("MemAvailable"))
    if total is None and root == _ROOT:
        total = _total_of_the_system()
    for limit, used in _control_groups(root):
        if total is None or limit < total:
            total = limit
        left = max(limit - used, 0)
        if free is None or left < free:
            free = left
    return total, free


def _total_of_the_system() -> int | None:
    """Returns the physical memory by POSIX; None on Windows."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and use, in bytes, of every cgroup of this process with a memory limit.

    In a container the group's own folder may not be mounted, but only its parents, so every level
    is tried and missing ones are skipped.
    """
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy for everything
            base, limit_file, use_file, cached = mount, "memory.max", "memory.current", "inactive_"
        elif "memory" in controllers.split(","):
            base, limit_file = mount / "memory", "memory.limit_in_bytes"
            use_file, cached = "memory.usage_in_bytes", "total_inactive_"
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            limit, used = _number(folder / limit_file), _number(folder / use_file)
            if limit is not None and used is not None:
                # The system takes cached file pages back before it refuses anything.
                kept = [line for line in _lines(folder / "memory.stat") if line.startswith(cached)]
                files = sum(int(line.split()[1]) for line in kept if "_file " in line)
                yield limit, max(used - files, 0)
            if folder == base:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # another system, or not ours to read
        return []


def _number(path: Path) -> int | None:
    words = _lines(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _kibibytes(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0]) * 1024


def threads_for_memory() -> int:
    """Returns how many threads to use for memory: one per core of this process, up to 8."""
    if hasattr(os, "sched_getaffinity"):  # not available on macOS and Windows
        return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    return min(_MAX_THREADS, os.cpu_count() or 1)


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
    populate_range(_bounds(part), _bounds(part if of is None else of), huge)


def populate_range(
    part: tuple[int, int], of: tuple[int, int], huge: HugePages = _huge_pages
) -> None:
    """Does the same for memory by its first and last addresses; see `populate`."""
    advise = _madvise()
    (start, stop), (low, high) = part, of
    if advise is None or stop - start < _SMALL:
        return
    import mmap

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
