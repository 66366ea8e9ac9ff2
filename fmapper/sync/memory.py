"""Parts of the arrays of one end, as arrays of NumPy on their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.arrays import HOST, Arrays
from fmapper.backends.discovery import adapter_of, owner_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints.boxes import Box, box_shape, full_box
from fmapper.errors import SyncError

if TYPE_CHECKING:
    import numpy as np

    from fmapper.sync.ends import End

    Array = np.ndarray[Any, Any]


class _Place(NamedTuple):
    """A part of an array, as planned."""

    name: str
    number: int
    box: Box
    is_whole: bool
    dtype: np.dtype[Any]
    adapter: Arrays


_NOTHING: tuple[Any, Any, Any] = (None, None, None)


class Memory:
    """Parts of arrays in this process.

    Views of tensors that are the same as in the last call are not made anew.
    """

    def __init__(self, end: End, parts: Sequence[tuple[str, Box]], role: str) -> None:
        from fmapper.files.dtypes import numpy_dtype

        self._role = role
        self._places = []
        for name, box in parts:
            number, outline = end.number(name), end.held[name]
            whole, adapter = box == full_box(outline.shape), owner_of(end.arrays[number])
            dtype = numpy_dtype(outline.dtype)
            self._places.append(_Place(name, number, box, whole, dtype, adapter))
        self._last = [_NOTHING] * len(self._places)

    def read(self, arrays: Sequence[Any]) -> list[Array]:
        """Returns the parts, given all arrays of the end.

        Raises:
            SyncError: One is not as it was when the sync was planned; names it.
        """
        fresh, parts = [], []
        for at, (place, (array, key, _)) in enumerate(zip(self._places, self._last, strict=True)):
            new = arrays[place.number]
            if new is not array or place.adapter.place(new) != key:
                fresh.append(at)
                parts.append(self._part(place, new))
        hosts = [host for _, _, host in self._last]
        for at, hosts[at] in zip(fresh, on_host(parts), strict=True):
            place, host = self._places[at], hosts[at]
            if host.dtype != place.dtype:
                raise self._error(place, f"its dtype was {place.dtype}, and is {host.dtype}")
            array = arrays[place.number]
            key = place.adapter.place(array) if place.is_whole else None
            self._last[at] = _NOTHING if key is None else (array, key, host)
        return hosts

    def _part(self, place: _Place, array: Any) -> Any:
        if adapter_of(array) is not place.adapter:
            raise self._error(place, f"it is a {type(array).__name__} now")
        if place.adapter.unusable([array]) is not None:
            raise self._error(place, "its values are gone, probably donated to a computation")
        held = parts_of(array)
        if place.box not in held:
            shape = box_shape(place.box)
            raise self._error(place, f"its shape was {shape}, or it is sharded otherwise")
        return held[place.box]

    def _error(self, place: _Place, text: str) -> SyncError:
        return other_than_planned(place.name, self._role, text)


def other_than_planned(name: str, role: str, text: str) -> SyncError:
    """Returns the error for an array whose shape, dtype or layout has changed."""
    return SyncError(
        f"{name} of the {role} is not as it was when the sync was planned: {text}. "
        "Create another Sync"
    )


def parts_of(array: Any) -> Mapping[Box, Any]:
    """Returns the parts of an array that are in this process; itself where it is whole."""
    adapter = owner_of(array)
    if isinstance(adapter, Meshes) and adapter.layout(array) is not None:
        return adapter.held_parts(array)
    return {full_box(adapter.shape(array)): array}


def on_host(arrays: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
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


def is_writable(array: Any) -> bool:
    """Returns whether the memory of an array can be written to from the host."""
    adapter = owner_of(array)
    if adapter.frozen or adapter.device(array).kind != "cpu":
        return False
    exchange = adapter.export([array], HOST)
    return 0 not in exchange.private and exchange.data[0].flags.writeable
