"""Writes lazy arrays, a panel at a time, several at once."""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fmapper.checkpoints.boxes import Box, box_shape, panel_boxes
from fmapper.checkpoints.dense import scratch
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.checkpoints.stored import BLOCK, SourceFile, StoredArray
from fmapper.errors import CheckpointError, LossyCastError

T = TypeVar("T")

_PANEL = 8 << 20  # bytes of a part that is held in memory
_WIDE = 32 << 20  # of a part with runs from everywhere in a file, which is read again for each part
_SHORTEST_RUN = 1 << 10  # bytes; shorter runs across the rows of a file are slow to read
_COPY = 64 << 20  # bytes that are copied within the kernel at a time
_PAGE = 4 << 10  # bytes; the kernel copies fast if source and target have the same offset in a page
_WORKERS = 2  # one reads and computes while another writes
_large = threading.Lock()  # only one panel larger than _WIDE at a time


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array, and its place in the target.

    Attributes:
        name: The name of the array.
        array: The array, or a run of bytes of a file.
        box: The part of the array.
        offset: The offset of its bytes in the target file.
        nbytes: The number of bytes.
    """

    name: str
    array: LazyArray | tuple[SourceFile, int]
    box: Box
    offset: int
    nbytes: int


def panels(array: LazyArray, wide: int = _PANEL) -> Iterator[tuple[Box, int]]:
    """Yields parts of an array of some 8 MiB in the order of its memory, each with its bytes.

    Parts are larger if they would consist of short runs from everywhere in a file.

    Args:
        array: The array.
        wide: The bytes of such a larger part.
    """
    itemsize = array.dtype.itemsize
    most = _PANEL // itemsize
    if array.ndim > 1 and array.byte_runs() is None:
        axis = _axis_of_runs(array)
        behind = array.shape[1:] if axis is None else array.shape[array.ndim + axis + 1 :]
        most = most if axis == -1 else wide // itemsize
        most = max(most, math.prod(behind) * _SHORTEST_RUN // itemsize)
    for box in panel_boxes(array.shape, most):
        yield box, math.prod(box_shape(box)) * itemsize


def _axis_of_runs(array: LazyArray) -> int | None:
    """Returns the dimension whose elements are contiguous in files, counted from the end.

    None if it is unknown.
    """
    from fmapper.checkpoints.lazy_operations import Cast, Concatenate, Part, Reshape, Transpose

    if isinstance(array, Transpose):
        axis = _axis_of_runs(array.operands[0])
        return None if axis is None else array.axes.index(array.ndim + axis) - array.ndim
    if isinstance(array, Concatenate | Cast | Part):
        return _axis_of_runs(array.operands[0])
    if isinstance(array, Reshape):
        (before,) = array.operands
        axis = _axis_of_runs(before)
        old = [at for at, n in enumerate(before.shape, -before.ndim) if n != 1]
        new = [at for at, n in enumerate(array.shape, -array.ndim) if n != 1]
        if axis not in old or [before.shape[at] for at in old] != [array.shape[at] for at in new]:
            return None
        return new[old.index(axis)]  # as in a stack, which inserts a dimension of size 1
    return None if isinstance(array, Operation) else -1


def pieces(name: str, array: LazyArray, offset: int) -> Iterator[Piece]:
    """Yields the pieces to write for an array: runs of bytes in files, or panels."""
    runs = array.byte_runs()
    if runs is not None and all(isinstance(run.array, StoredArray) for run in runs):
        for stored, start, stop in runs:
            assert isinstance(stored, StoredArray)
            most = _COPY if stored.file.is_copied else _PANEL
            for at in range(start, stop, most):
                part = min(most, stop - at)
                yield Piece(name, (stored.file, stored.offset + at), (), offset, part)
                offset += part
        return
    for box, nbytes in panels(array, _WIDE):
        if nbytes:
            yield Piece(name, array, box, offset, nbytes)
            offset += nbytes


def write_piece(handle: int, piece: Piece, check: bool) -> int | None:
    """Writes a piece to its place.

    Returns:
        The checksum of the written bytes if `check`; None if they were copied.
    """
    if isinstance(piece.array, tuple) and piece.array[0].is_copied:
        file, start = piece.array
        with file.handle() as source:
            _copy(source, handle, start, piece.offset, piece.nbytes)
        return None
    with _bytes_of(piece) as data:
        _pwrite(handle, data, piece.offset)
        return zlib.crc32(data) if check else None


@contextmanager
def _bytes_of(piece: Piece) -> Iterator[memoryview]:
    """Reads a panel into memory of this thread, as bytes to write."""
    if not isinstance(piece.array, Operation | StoredArray):
        yield read_bytes(piece)
        return
    shape, dtype = box_shape(piece.box), piece.array.dtype
    with _large if piece.nbytes > _WIDE else nullcontext(), scratch(shape, dtype) as values:
        with _name_piece(piece):
            piece.array.read(piece.box, values)
        yield memoryview(values.reshape(-1).view("u1").data)


def read_bytes(piece: Piece) -> memoryview:
    """Reads a panel as bytes to write."""
    import numpy as np

    if isinstance(piece.array, tuple):
        file, start = piece.array
        data = _buffer(piece.nbytes)
        with file.handle() as source:
            file.read_into(source, data, start)
        return data
    with _name_piece(piece):
        values = np.ascontiguousarray(piece.array.read(piece.box))
    return memoryview(values.reshape(-1).view("u1").data)


@contextmanager
def _name_piece(piece: Piece) -> Iterator[None]:
    """Names the array in errors."""
    try:
        yield
    except (CheckpointError, LossyCastError) as error:
        raise type(error)(f"{piece.name}: {error}") from error


def _copy(source: int, target: int, start: int, offset: int, nbytes: int) -> None:
    """Copies bytes from file to file, in the kernel if possible and fast."""
    done = 0
    try:
        while done < nbytes and not (start - offset) % _PAGE:
            count = os.copy_file_range(source, target, nbytes - done, start + done, offset + done)
            if not count:
                break
            done += count
    except (AttributeError, OSError):  # not on this system, or not between these file systems
        pass
    with scratch((BLOCK,), "u1") as block:
        data = memoryview(block.data)
        while done < nbytes:
            count = os.preadv(source, [data[: nbytes - done]], start + done)
            if not count:
                raise CheckpointError("a file became shorter while it was copied")
            _pwrite(target, data[:count], offset + done)
            done += count


def _pwrite(handle: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(handle, data, offset)
        data, offset = data[count:], offset + count


def in_order(
    work: Callable[[Any], T], items: Iterable[Any], workers: int = _WORKERS
) -> Iterator[T]:
    """Yields `work(item)` for each item in order, computed a few ahead in threads."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        pending: deque[Future[T]] = deque()
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class Writer:
    """The writer of a format: files that are filled a piece at a time.

    With a journal, pieces that an earlier run has written are not written again. Every complete
    file is read back and compared.

    Attributes:
        path: The file, or the folder, to fill.
        on_bytes: Called with the number of bytes that have been written.
    """

    def __init__(
        self,
        path: Path,
        *,
        journal: Journal | None = None,
        check: bool = False,
        on_bytes: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.path = path
        self.on_bytes = on_bytes
        self._journal = journal
        self._check = check
        self._written: list[tuple[Piece, int | None]] = []

    def inside(self, name: str) -> Writer:
        """Returns a writer for one file of the folder."""
        return Writer(
            self.path / name, journal=self._journal, check=self._check, on_bytes=self.on_bytes
        )

    @contextmanager
    def open(self, name: str | None = None) -> Iterator[BinaryIO]:
        """Opens the file, or one of a folder, for writing from its beginning."""
        path = self.path if name is None else self.path / name
        path.touch()
        self._written = []
        with path.open("r+b") as file:
            yield file
            file.truncate()
        if self._check and not (self._journal and self._journal.is_complete(path.name)):
            self._compare(path)
        if self._journal is not None:
            self._journal.complete(path.name)

    def text(self, name: str, text: str) -> None:
        """Writes a text beside the files of a folder."""
        (self.path / name).write_text(text, encoding="utf-8")

    def put(self, file: BinaryIO, name: str, array: LazyArray, offset: int | None = None) -> None:
        """Writes an array at the current position, or at a given one, and advances."""
        self.put_all(file, {name: array}, offset)

    def put_all(
        self, file: BinaryIO, arrays: Mapping[str, LazyArray], offset: int | None = None
    ) -> None:
        """Writes arrays one after another."""
        file.flush()
        handle = file.fileno()
        at = file.tell() if offset is None else offset
        base = Path(file.name).name

        def todo() -> Iterator[Piece]:
            nonlocal at
            for name, array in arrays.items():
                for piece in pieces(name, array, at):
                    if self._journal is not None and self._journal.has(base, piece):
                        self.on_bytes(piece.nbytes)
                    else:
                        yield piece
                at += array.nbytes

        def write(piece: Piece) -> tuple[Piece, int | None]:
            return piece, write_piece(handle, piece, self._check)

        for piece, checksum in in_order(write, todo()):
            if self._journal is not None:
                self._journal.add(base, piece)
            if self._check:
                self._written.append((piece, checksum))
            self.on_bytes(piece.nbytes)
        file.seek(at)

    def boxes(self, array: LazyArray) -> list[Box]:
        """Returns the boxes of the parts that `bytes_of` yields."""
        return [box for box, nbytes in panels(array) if nbytes]

    def bytes_of(self, name: str, array: LazyArray) -> Iterator[memoryview]:
        """Yields the bytes of an array in order, some 8 MiB at a time."""
        return (data for _, _, data in self.panels_of({name: array}))

    def panels_of(self, arrays: Mapping[str, LazyArray]) -> Iterator[tuple[str, Box, memoryview]]:
        """Yields the parts of arrays in order: the name, the box and the bytes of each."""
        todo = (piece for name, array in arrays.items() for piece in _panels(name, array))
        for piece, data in in_order(lambda piece: (piece, read_bytes(piece)), todo):
            yield piece.name, piece.box, data
            self.on_bytes(piece.nbytes)

    def _compare(self, path: Path) -> None:
        """Reads back what was written."""
        with path.open("rb") as file:
            handle = file.fileno()

            def is_same(written: tuple[Piece, int | None]) -> str | None:
                return None if _reads_back(handle, *written) else written[0].name

            for wrong in in_order(is_same, self._written):
                if wrong is not None:
                    raise CheckpointError(
                        f"{path}: {wrong}: reads back differently than it was written"
                    )


def _buffer(nbytes: int) -> memoryview:
    """Allocates memory without initialising it."""
    import numpy as np

    return memoryview(np.empty(nbytes, np.uint8).data)


def _reads_back(handle: int, piece: Piece, checksum: int | None) -> bool:
    """Returns whether a file has the right bytes, by checksum or compared with the copied file."""
    import numpy as np

    actual = 0
    with ExitStack() as stack:
        data, other = (stack.enter_context(scratch((BLOCK,), "u1")) for _ in range(2))
        copied = piece.array if isinstance(piece.array, tuple) else None
        source = stack.enter_context(copied[0].handle()) if copied else -1
        for at in range(0, piece.nbytes, BLOCK):
            count = min(BLOCK, piece.nbytes - at)
            if not _read_fully(handle, memoryview(data[:count].data), piece.offset + at):
                return False
            if copied is None:
                actual = zlib.crc32(data[:count].data, actual)
                continue
            file, start = copied
            file.read_into(source, memoryview(other[:count].data), start + at)
            if not np.array_equal(data[:count], other[:count]):
                return False
    return copied is not None or actual == checksum


def _read_fully(handle: int, data: memoryview, offset: int) -> bool:
    """Fills a buffer; returns whether the file is long enough."""
    at = 0
    while at < len(data):
        count = os.preadv(handle, [data[at:]], offset + at)
        if not count:
            return False
        at += count
    return True


def _panels(name: str, array: LazyArray) -> Iterator[Piece]:
    return (Piece(name, array, box, 0, nbytes) for box, nbytes in panels(array) if nbytes)


class Journal:
    """A record of the pieces that have been written, in a text file beside a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._done: set[tuple[str, int, int]] = set()
        self._complete: set[str] = set()
        if path.exists():
            for line in path.read_text().splitlines(keepends=True):
                fields = line.split(" ")
                if not line.endswith("\n") or len(fields) != 3:
                    continue  # torn when the process was killed
                if fields[2] == "complete\n":
                    self._complete.add(fields[0])
                else:
                    self._done.add((fields[0], int(fields[1]), int(fields[2])))
        self._file = path.open("a")
        self._file.write("\n")  # after the torn line

    def has(self, file: str, piece: Piece) -> bool:
        """Returns whether a piece has been written."""
        return (file, piece.offset, piece.nbytes) in self._done

    def add(self, file: str, piece: Piece) -> None:
        """Records that a piece has been written."""
        self._file.write(f"{file} {piece.offset} {piece.nbytes}\n")
        self._file.flush()

    def is_complete(self, file: str) -> bool:
        """Returns whether a file has been written and compared."""
        return file in self._complete

    def complete(self, file: str) -> None:
        """Records that a file has been written and compared."""
        self._file.write(f"{file} 0 complete\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
