"""Arrays in the memory of the host: parts of arrays, and memory that is used again."""

from __future__ import annotations

import gc
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.backends.arrays import HOST, Arrays
from fmapper.backends.discovery import owner_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints.boxes import Box, box_shape, box_slices, full_box, parts_of_box
from fmapper.checkpoints.dense import copy_into
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import SyncError
from fmapper.machine import populate
from fmapper.moves.host_copy import ALIGNMENT, copy_all, host_buffers

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_PIECE = 8 << 20  # bytes that a thread writes at a time; `copy_all` divides no such piece
_SOME = 512  # arrays that are read at a time: fewer than make Python look for garbage
_LARGE = 1 << 20  # bytes from which memory comes from the system in pages of its own


class Values(LazyArray):
    """A part of an array of the source in this process."""

    array: Any = None  # the values during a call

    def __init__(self, box: Box, dtype: Any) -> None:
        self.shape, self.dtype = box_shape(box), dtype

    def _read(self, box: Box) -> Any:
        return self.array[(*box_slices(box), ...)]


def parts_of(array: Any) -> Mapping[Box, Any]:
    """Returns the parts of an array that are in this process; itself where it is whole."""
    adapter = owner_of(array)
    if isinstance(adapter, Meshes) and adapter.layout(array) is not None:
        return adapter.held_parts(array)
    return {full_box(adapter.shape(array)): array}


def on_host(arrays: Sequence[Any], private: list[int] | None = None) -> list[Array]:
    """Returns arrays as those of NumPy; the indices of copies are added to `private`."""
    hosts: list[Any] = [None] * len(arrays)
    for adapter, numbers in _by_adapter(arrays):
        exchange = adapter.export([arrays[number] for number in numbers], HOST)
        for number, data in zip(numbers, exchange.data, strict=True):
            hosts[number] = data
        if private is not None:
            private += (numbers[at] for at in exchange.private)
    return hosts


def _by_adapter(arrays: Sequence[Any]) -> Iterator[tuple[Arrays, Sequence[int]]]:
    """Yields each framework of arrays with their indices."""
    adapters = {owner_of(array) for array in {type(array): array for array in arrays}.values()}
    for adapter in adapters:
        every = range(len(arrays))
        is_alone = len(adapters) == 1
        yield adapter, every if is_alone else [n for n in every if owner_of(arrays[n]) is adapter]


def is_writable(array: Any, name: str) -> bool:
    """Returns whether the host can write to an array's memory; raises if nobody can."""
    adapter = owner_of(array)
    if adapter.frozen or adapter.device(array).kind != "cpu":
        return False
    exchange = adapter.export([array], HOST)
    if not exchange.data[0].flags.writeable or adapter.is_number(array):
        raise SyncError(f"{name}: the array of the target is read-only; pass a copy of it")
    return 0 not in exchange.private


def fill(reads: Iterable[tuple[Array, LazyArray]]) -> None:
    """Reads arrays into others, on several threads if they are large."""
    left = iter(reads)
    while some := [*itertools.islice(left, _SOME)]:
        pieces: list[tuple[Array, LazyArray]] = []
        for read in some:
            out, array = read
            if out.nbytes <= _PIECE:
                pieces.append(read)
            else:
                boxes = parts_of_box(full_box(out.shape), _PIECE // out.itemsize)
                pieces += ((out[index], array.part(box)) for box, index in boxes)
        copy_all(pieces, _read)


def _read(pieces: Sequence[tuple[Array, LazyArray]]) -> None:
    for out, array in pieces:
        if type(array) is Values:
            copy_into(out, array.array)
        else:
            array.read(None, out)


class Slots:
    """Host memory that is used again once nobody holds an array on it: references are counted."""

    def __init__(self) -> None:
        self._slots: dict[Any, list[_Slot]] = {}

    def get(self, key: Any, shape: tuple[int, ...], dtype: Any, count: int = 2) -> Array:
        """Returns uninitialised memory that nobody else holds, aligned for all frameworks.

        Of its `count` slots one may be in use, with the old values, until the new are there.
        """
        if key not in self._slots:
            self._slots[key] = [_Slot(shape, dtype) for _ in range(count)]
        slots = self._slots[key]
        for collect in (gc.collect, None):  # JAX lets go of memory when garbage is collected
            for slot in filter(_Slot.is_free, slots):
                return slot.array
            if collect is not None:
                collect(0)
        slots[:] = [*slots[1:], _Slot(shape, dtype)]  # the memory of old arrays is others' now
        return slots[-1].array


class _Slot:
    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        import numpy as np

        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes >= _LARGE:
            (self.array,) = host_buffers([(shape, dtype)])
        else:
            memory = np.empty(nbytes + ALIGNMENT, np.uint8)
            start = -memory.ctypes.data % ALIGNMENT
            self.array = memory[start : start + nbytes].view(dtype).reshape(shape)
            del memory
        populate(self.array)
        self._references = self._count()

    def _count(self) -> int:
        return sys.getrefcount(self.array.base) + sys.getrefcount(self.array)

    def is_free(self) -> bool:
        return self._count() <= self._references
