"""The backend of arrays in files, which are read when they are moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any, ClassVar

from fmapper.backends.arrays import HOST, Arrays, Device, Exchange
from fmapper.backends.discovery import get_adapter, register_adapter
from fmapper.backends.dtypes import is_inexact
from fmapper.checkpoints.boxes import Box, full_box, parts_of_box
from fmapper.checkpoints.formats.writer import in_order
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.stored import StoredArray, exact_reads
from fmapper.errors import BatchError, DeviceUnavailableError
from fmapper.files.dtypes import name_of_dtype
from fmapper.machine import populate, threads_for_memory
from fmapper.moves.host_copy import host_buffers

if TYPE_CHECKING:
    from concurrent.futures import Future

DISK = Device("file", "cpu")
_PIECE = 8 << 20  # bytes that one thread reads at a time
_PORTION = 256 << 20  # bytes in host memory on the way to a device
# The arrays that are read ahead, by identity.
_ahead: ContextVar[dict[int, Future[Any]] | None] = ContextVar("ahead", default=None)


class FileAdapter(Arrays):
    """The adapter for `LazyArray`. Nothing can be moved to it: `fmapper.save` writes files."""

    name: ClassVar[str] = "file"
    host_only: ClassVar[bool] = True
    array_types: ClassVar[tuple[type, ...]] = (LazyArray,)

    def is_array_type(self, cls: type) -> bool:
        """Returns whether a class is a lazy array."""
        return issubclass(cls, LazyArray)

    def device(self, array: Any) -> Device:
        """Returns the host, always."""
        return DISK

    def dtype(self, array: Any) -> str:
        """Returns the name of the dtype in NumPy or ml_dtypes."""
        return name_of_dtype(array.dtype)

    def shape(self, array: Any) -> tuple[int, ...]:
        """Returns `array.shape`."""
        return tuple(array.shape)

    def devices(self) -> Sequence[Device]:
        """Returns none: arrays are not moved to this backend."""
        return ()

    def find_device(self, kind: str, index: int | None) -> Device:
        """Raises for any device but the host: elsewhere, an array needs a backend."""
        if kind == DISK.kind:
            return DISK
        raise DeviceUnavailableError(
            "this array of a checkpoint is still in its file. Choose its backend with to_numpy, "
            f"to_torch(device={kind!r}), to_jax(device={kind!r}) or fmapper.load(path, like=model)."
        )

    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterable[Any]:
        """Returns the arrays unchanged: they are not in memory."""
        return arrays

    def export(self, arrays: Sequence[Any], target: Device) -> Exchange:
        """Reads the arrays into memory of their own, several at once, unless the target does."""
        reads = _reads_ahead(arrays)
        stored = {
            at: a for at, a in enumerate(arrays) if isinstance(a, StoredArray) and at not in reads
        }
        is_read = _is_reading(target)
        results: list[Any] = [stored.get(at) if is_read else None for at in range(len(arrays))]
        plain = [] if is_read else list(stored.items())
        buffers = host_buffers([(a.shape, a.dtype) for _, a in plain])
        work: list[Callable[[], None]] = []
        for (at, array), buffer in zip(plain, buffers, strict=True):
            results[at] = buffer
            boxes = parts_of_box(full_box(array.shape), _PIECE // array.dtype.itemsize)
            work += [partial(_fill, at, array, buffer, *part) for part in boxes]
        computed = [at for at, new in enumerate(results) if new is None and at not in reads]
        work += [partial(_compute, at, arrays[at], results) for at in computed]
        for _ in in_order(call, work, threads_for_memory()):
            pass
        for at, read in reads.items():
            results[at] = _result(at, read)
        return Exchange(results, private=range(len(arrays)))

    def portion(self, arrays: Sequence[Any], target: Device | None) -> int | None:
        """Returns no limit if the target reads all arrays."""
        is_read = target is not None and _is_reading(target)
        return None if is_read and all(isinstance(a, StoredArray) for a in arrays) else _PORTION

    def read_box(self, array: Any, box: Sequence[tuple[int, int]]) -> Any:
        """Reads only a box of the array, such as the shard of this process."""
        with exact_reads():
            values = array.read(box)
        return values if values.flags.owndata and values.flags.writeable else values.copy()

    def take(self, exchange: Exchange, device: Device, *, share: bool) -> Iterable[Any]:
        """Raises, because arrays are written to files by saving."""
        raise TypeError("arrays cannot be moved to a file: use fmapper.save(tree, path)")

    def cast(self, array: Any, dtype: str) -> tuple[Any, bool]:
        """Casts floats when they are read, and integers immediately, to check that they fit."""
        if is_inexact(dtype) and is_inexact(array.dtype.name):
            return array.astype(dtype), True
        new, survived = get_adapter(HOST.backend, Arrays).cast(array.read(), dtype)
        return LazyArray.of(new), survived


@contextmanager
def read_ahead(arrays: Iterable[LazyArray]) -> Iterator[None]:
    """Reads arrays into memory in the background while the block runs.

    Arrays that the block moves are already in memory, or are read immediately. Arrays that it does
    not move are dropped at its end. Arrays that are computed from others are read only when they
    are moved.
    """
    from concurrent.futures import ThreadPoolExecutor  # slow to import

    plain = list({id(a): a for a in arrays if isinstance(a, StoredArray)}.values())
    buffers = host_buffers([(a.shape, a.dtype) for a in plain])
    pool = ThreadPoolExecutor(threads_for_memory())
    reads: dict[int, Future[Any]] = {}
    token = _ahead.set(reads)
    try:
        for array, buffer in zip(plain, buffers, strict=True):
            reads[id(array)] = pool.submit(_read_whole, array, buffer)
        del buffers
        yield
    finally:
        _ahead.reset(token)
        pool.shutdown(cancel_futures=True)


def _is_reading(target: Device) -> bool:
    """Returns whether a backend reads files into the memory of its device."""
    return target != HOST and get_adapter(target.backend, Arrays).reads(target)


def _read_whole(array: StoredArray, buffer: Any) -> Any:
    """Fills a buffer with few calls, because each waits for the GIL before it returns."""
    populate(buffer)
    array.read_into(buffer, full_box(array.shape))
    return buffer


def _reads_ahead(arrays: Sequence[Any]) -> dict[int, Future[Any]]:
    """Returns the reads that have begun, by position; cancels the others."""
    reads = _ahead.get() or {}
    begun = {at: reads.pop(id(array)) for at, array in enumerate(arrays) if id(array) in reads}
    return {at: read for at, read in begun.items() if not read.cancel()}


def _result(at: int, read: Future[Any]) -> Any:
    try:
        return read.result()
    except Exception as error:
        raise BatchError(at) from error


def _fill(at: int, array: StoredArray, buffer: Any, box: Box, place: Any) -> None:
    try:
        populate(buffer[place], buffer)
        array.read_into(buffer[place], box)
    except Exception as error:
        raise BatchError(at) from error


def _compute(at: int, array: LazyArray, results: list[Any]) -> None:
    try:
        values = array.read()
        results[at] = values if values.flags.owndata and values.flags.writeable else values.copy()
    except Exception as error:
        raise BatchError(at) from error


register_adapter(FileAdapter())
