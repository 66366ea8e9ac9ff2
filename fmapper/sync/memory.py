"""Arrays in the memory of the host: parts of arrays, and memory that is used again."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.backends.arrays import HOST, Arrays
from fmapper.backends.discovery import owner_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints.boxes import Box, full_box, parts_of_box
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import SyncError
from fmapper.machine import populate
from fmapper.moves.host_copy import ALIGNMENT, copy_all, host_buffers

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_PIECE = 8 << 20  # bytes that a thread writes at a time; `copy_all` divides no such piece
_LARGE = 1 << 20  # bytes from which memory comes from the system in pages of its own


def parts_of(array: Any) -> Mapping[Box, Any]:
    """Returns the parts of an array that are in this process; itself where it is whole."""
    adapter = owner_of(array)
    if isinstance(adapter, Meshes) and adapter.layout(array) is not None:
        return adapter.held_parts(array)
    return {full_box(adapter.shape(array)): array}


def on_host(arrays: Sequence[Any]) -> list[Array]:
    """Returns arrays as those of NumPy, on the same memory where that is possible."""
    hosts: list[Any] = [None] * len(arrays)
    by_adapter: dict[Arrays, list[int]] = {}
    for number, array in enumerate(arrays):
        by_adapter.setdefault(owner_of(array), []).append(number)
    for adapter, numbers in by_adapter.items():
        exchange = adapter.export([arrays[number] for number in numbers], HOST)
        for number, data in zip(numbers, exchange.data, strict=True):
            hosts[number] = data
    return hosts


def is_writable(array: Any, name: str) -> bool:
    """Returns whether the host can write to an array's memory; raises for a read-only array."""
    adapter = owner_of(array)
    if adapter.frozen or adapter.device(array).kind != "cpu":
        return False
    exchange = adapter.export([array], HOST)
    if 0 not in exchange.private and not exchange.data[0].flags.writeable:
        raise SyncError(f"{name}: the array of the target is read-only; pass a copy of it")
    return 0 not in exchange.private


def fill(reads: Iterable[tuple[LazyArray, Box, Array]]) -> None:
    """Reads boxes of arrays into others, on several threads if they are large."""
    pieces: list[tuple[Array, LazyArray, Box]] = []
    for array, box, out in reads:
        small = [(box, ...)] if out.nbytes <= _PIECE else None
        for inner, index in small or parts_of_box(box, _PIECE // out.itemsize):
            pieces.append((out[index], array, inner))
    copy_all(pieces, _read)


def _read(pieces: Sequence[tuple[Array, LazyArray, Box]]) -> None:
    for out, array, box in pieces:
        array.read(box, out)


class Slots:
    """Host memory for arrays of frameworks that take it over.

    A slot is used again once nobody holds an array on it: its references are counted.
    """

    def __init__(self) -> None:
        self._slots: dict[Any, list[_Slot]] = {}

    def get(self, key: Any, shape: tuple[int, ...], dtype: Any, count: int = 2) -> Array:
        """Returns uninitialised memory that nobody else holds, aligned for all frameworks.

        Of its `count` slots one may be in use, with the old values, until the new are there.
        """
        if key not in self._slots:
            self._slots[key] = [_Slot(shape, dtype) for _ in range(count)]
        slots = self._slots[key]
        free = next(filter(_Slot.is_free, slots), None)
        if free is None:
            gc.collect(0)  # JAX lets go of memory when garbage is collected
            free = next(filter(_Slot.is_free, slots), None)
        if free is None:  # somebody has kept old arrays; their memory is theirs
            free = _Slot(shape, dtype)
            slots[:] = [*slots[1:], free]
        return free.array


class _Slot:
    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._memory, self.array = _allocate(shape, dtype)
        populate(self.array)
        self._references = self._count()

    def _count(self) -> int:
        return sys.getrefcount(self._memory) + sys.getrefcount(self.array)

    def is_free(self) -> bool:
        return self._count() <= self._references


def _allocate(shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    import numpy as np

    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes >= _LARGE:
        (slot,) = host_buffers([(shape, dtype)])
        assert slot.base is not None
        return slot.base, slot
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory, memory[start : start + nbytes].view(dtype).reshape(shape)
