"""Arrays in files, of which only the requested parts are read."""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

from fmapper.checkpoints.boxes import Box, box_shape, full_box, parts_of_box
from fmapper.checkpoints.dense import copy_into, scratch
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import CheckpointError
from fmapper.files.dtypes import numpy_dtype

_COVER = 1 << 20  # bytes of one read that includes the gaps between runs
_RUN = 4 << 10  # bytes; longer runs of a local file are read one by one
_SHORT_RUN = 256  # the same if gaps must not be read
_GAP = 16 << 10  # bytes whose reading takes as long as a call
_PIECE = 1 << 30  # bytes that one call reads: systems refuse more than 2 GiB
BLOCK = 1 << 20  # bytes that are read and moved on while they are in the cache


_reads_exactly: ContextVar[bool] = ContextVar("reads_exactly", default=False)


@contextmanager
def exact_reads() -> Iterator[None]:
    """Reads runs of a local file, unless they are very short, without the gaps between them.

    A single process is as fast if it reads the gaps; several processes that each read a few columns
    of an array would all read the whole array.
    """
    token = _reads_exactly.set(True)
    try:
        yield
    finally:
        _reads_exactly.reset(token)


class SourceFile:
    """A file of a checkpoint, opened for each read to limit the number of open files.

    It is read with `pread` and not mapped, because truncating a mapped file kills the process.
    """

    __slots__ = ("_known", "path", "size")

    is_local: ClassVar[bool] = True
    is_copied: ClassVar[bool] = True  # its bytes may be copied without being read

    def __init__(self, path: Path) -> None:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is not a regular file")
        self.path = path
        self.size = status.st_size
        self._known = status.st_ino, status.st_size, status.st_mtime_ns

    @contextmanager
    def handle(self) -> Iterator[int]:
        """Opens the file, if it is unchanged since its header was read."""
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        handle = os.open(self.path, flags)
        try:
            status = os.fstat(handle)
            if (status.st_ino, status.st_size, status.st_mtime_ns) != self._known:
                raise CheckpointError(f"{self.path}: has changed since its header was read")
            yield handle
        finally:
            os.close(handle)

    def read_into(self, handle: int, out: memoryview, offset: int) -> None:
        """Fills a buffer with the bytes at an offset."""
        at = 0
        while at < len(out):
            count = os.preadv(handle, [out[at : at + _PIECE]], offset + at)
            if not count:
                raise CheckpointError(f"{self.path}: became shorter while it was read")
            at += count


class StoredArray(LazyArray):
    """An array stored in a file in C order, without compression.

    Attributes:
        file: The file.
        offset: The offset of the array in bytes.
    """

    stored = True

    def __init__(self, file: SourceFile, offset: int, shape: Sequence[int], dtype: str) -> None:
        self.shape, self.dtype = tuple(shape), numpy_dtype(dtype)
        self.file = file
        self.offset = offset

    def _read(self, box: Box) -> Any:
        import numpy as np

        out = np.empty(box_shape(box), self.dtype)
        self.read_into(out, box)
        return out

    def _fill(self, box: Box, out: Any) -> None:
        if out.flags.c_contiguous:
            self.read_into(out, box)
            return
        with self.file.handle() as handle:
            for part, place in parts_of_box(box, BLOCK // self.dtype.itemsize):
                with scratch(box_shape(part), self.dtype) as rows:
                    self._read_part(handle, rows, part)
                    copy_into(out[place], rows)

    @property
    def extent(self) -> tuple[str, int]:
        """The file and the offset in it."""
        return str(self.file.path), self.offset

    def read_bytes(self, out: memoryview, start: int) -> None:
        """Fills a buffer with the bytes from `start` on."""
        with self.file.handle() as handle:
            self.file.read_into(handle, out, self.offset + start)
        if self.dtype.kind == "b":
            self._check_bools(out)

    def read_into(self, out: Any, box: Box) -> None:
        """Reads a part into a C-contiguous array of its shape."""
        if not out.size:
            return
        with self.file.handle() as handle:
            self._read_part(handle, out, box)

    def _read_part(self, handle: int, out: Any, box: Box) -> None:
        self._gather(handle, out, box, self.offset)
        if self.dtype.kind == "b":
            self._check_bools(out)

    def _check_bools(self, values: Any) -> None:
        import numpy as np

        if (np.asarray(values).view("u1") > 1).any():
            raise CheckpointError(f"{self.file.path}: a bool is neither true nor false")

    def _gather(self, handle: int, out: Any, box: Box, offset: int) -> None:
        axis = len(self.shape) - out.ndim
        strides = _strides(self.shape, self.dtype.itemsize)
        if out.ndim == 0 or box[axis + 1 :] == full_box(self.shape[axis + 1 :]):
            begin = box[axis][0] * strides[axis] if out.ndim else 0
            self.file.read_into(handle, _bytes(out), offset + begin)
            return
        start, stop = box[axis]
        count = self._rows_to_cover(box[axis:], strides[axis])
        if not count:
            for row, at in zip(out, range(start, stop), strict=True):
                self._gather(handle, row, box, offset + at * strides[axis])
            return
        for at in range(start, stop, count):
            rows = (at, min(at + count, stop)), *box[axis + 1 :]
            inner = out[at - start : at - start + count]
            self._cover(handle, inner, rows, self.shape[axis:], offset)

    def _rows_to_cover(self, box: Box, stride: int) -> int:
        """Returns how many rows to read at a time including gaps; 0 to read only the runs."""
        count = box[0][1] - box[0][0]
        if not self.file.is_local:  # each read is a request
            return count if count * stride <= _COVER else 0
        run = self._run(box[1:])
        if run >= (_SHORT_RUN if _reads_exactly.get() else _RUN):
            return 0
        wanted = math.prod(box_shape(box[1:])) * self.dtype.itemsize
        return _COVER // stride if stride - wanted <= _GAP * (wanted // run) else 0

    def _run(self, box: Box) -> int:
        """Returns the length in bytes of the contiguous runs of a box."""
        run = self.dtype.itemsize
        for (low, high), size in zip(reversed(box), reversed(self.shape), strict=False):
            run *= high - low
            if high - low < size:
                break
        return run

    def _cover(self, handle: int, out: Any, box: Box, shape: Sequence[int], offset: int) -> None:
        """Reads the rows with requested elements, and selects these."""
        (start, stop), *rest = box
        step = math.prod(shape[1:]) * self.dtype.itemsize
        with scratch((stop - start, *shape[1:]), self.dtype) as rows:
            self.file.read_into(handle, _bytes(rows), offset + start * step)
            copy_into(out, rows[(slice(None), *itertools.starmap(slice, rest))])


def _strides(shape: Sequence[int], itemsize: int) -> list[int]:
    return [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]


def _bytes(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view("u1"))
