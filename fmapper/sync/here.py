"""The part of a sync in one process: reads, computes, and puts arrays into the target."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.arrays import Arrays, Exchange
from fmapper.backends.discovery import owner_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints.boxes import Box, box_shape, full_box
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import SyncError
from fmapper.sync.inputs import Input, leaves_of, with_steps
from fmapper.sync.memory import Slots, fill, is_writable, on_host, parts_of
from fmapper.sync.on_device import OnDevice

if TYPE_CHECKING:
    import numpy as np

    from fmapper.sync.ends import End
    from fmapper.sync.planning import Transfer

    Array = np.ndarray[Any, Any]

_CHECKED = 1 << 20  # bytes that are cast at a time to see whether they can be


class _Target(NamedTuple):
    name: str
    number: int  # in the end
    array: LazyArray  # what it is made of
    boxes: tuple[Box, ...]  # its parts that are here
    in_place: bool  # it gets new values, and is not replaced
    writable: bool  # its memory can be written to from the host
    abstract: bool  # it has no memory
    shared: int | None  # the array of the source that takes its place

    @classmethod
    def of(cls, name: str, array: LazyArray, end: End, shared: int | None) -> _Target:
        number, (boxes,) = end.numbers[name], end.held[name].boxes.values()
        place, parts = end.places[number], end.parts(name, end.arrays).values()
        writable, abstract = all(is_writable(x, name) for x in parts), place.device.kind == "meta"
        return cls(name, number, array, boxes, not place.adapter.frozen, writable, abstract, shared)

    @property
    def is_copied(self) -> bool:
        """Whether parts of the source are copied into it as they are."""
        return self.writable and isinstance(self.array, Input) and not self.array.steps


class Here:
    """The reads, computations, messages and writes of one process.

    Attributes:
        nbytes: Bytes of the arrays of the target that are here.

    Args:
        source: The end that is read; None if it is in other processes, like the target.
        arrays: The arrays of the target by name, made of inputs.
        computed: Those that are computed where they and their sources lie, made of leaves.
        sent: What goes to other processes.
    """

    def __init__(
        self,
        source: End | None,
        target: End | None,
        arrays: Mapping[str, LazyArray],
        computed: Mapping[str, LazyArray],
        sent: Sequence[Transfer],
        *,
        share: bool,
    ) -> None:
        self._source, self._target, self._slots = source, target, Slots()
        self._targets: list[_Target] = []
        self._computed: list[OnDevice] = []
        self._cast = [transfer for transfer in sent if transfer.array.steps]
        inputs = {transfer.array: None for transfer in sent}
        if target is not None:
            for name in filter(target.held.__contains__, arrays):
                shared = _share(name, arrays[name], source, target) if share and source else None
                self._targets.append(_Target.of(name, arrays[name], target, shared))
                inputs |= dict.fromkeys(leaves_of(arrays[name]))
        if source is not None and target is not None:
            groups: dict[Hashable, dict[str, LazyArray]] = {}
            for name, array in computed.items():
                if name in target.held:
                    adapter = target.places[target.numbers[name]].adapter
                    groups.setdefault((adapter, target.held[name].domain), {})[name] = array
            self._computed = [OnDevice(source, target, group) for group in groups.values()]
        self._inputs = [*inputs]
        self._read = {x.name: None for x in inputs if source is not None and x.name in source.held}
        self.nbytes = sum(group.nbytes for group in self._computed)
        for each in self._targets:
            elements = sum(math.prod(box_shape(box)) for box in each.boxes)
            self.nbytes += elements * each.array.dtype.itemsize
        self.release()

    def release(self) -> None:
        """Drops the references to the values of a call."""
        for leaf in self._inputs:
            leaf.parts = {}
        self._arrays: list[Any] = []  # of the source
        self._old: list[Any] = []  # those of the target
        self._received: list[tuple[Transfer, Array]] = []
        self._memory: dict[tuple[str, Box], Array] = {}
        self._new: dict[int, Any] = {}
        self._copies: list[tuple[LazyArray, Box, Array]] = []
        self._changed: dict[Arrays, list[tuple[Any, Any]]] = {}
        self._written: dict[Arrays, list[Any]] = {}

    def begin(self, tree: Any, *, is_written: bool) -> None:
        """Reads both ends.

        Raises:
            SyncError: One is not as planned, or the target has no memory although it is written,
                or has some although it is not.
            LossyCastError: A value that is to be sent becomes infinite.
        """
        for target in self._targets:
            if is_written and target.abstract:
                raise SyncError(f"{target.name}: the target has no memory there; use sync.parts()")
            if not is_written and target.in_place and not target.abstract:
                raise SyncError(
                    f"{target.name}: the target has memory, which a call writes to. Pass one "
                    "without, such as tensors on the device meta"
                )
        self._is_written = is_written
        if self._source is not None:
            leaves = {name for group in self._computed for name in group.leaves}
            self._arrays = self._source.read([*self._read, *leaves], tree)
            parts = {n: self._source.parts(n, self._arrays) for n in self._read}
            hosts = iter(on_host([part for each in parts.values() for part in each.values()]))
            values = {n: {box: next(hosts) for box in each} for n, each in parts.items()}
            for leaf in self._inputs:
                held = values.get(leaf.name, {}).items()
                leaf.parts = {box: with_steps(LazyArray.of(x), leaf.steps) for box, x in held}
        if self._target is not None:
            computed = [name for group in self._computed for name in group.names]
            self._old = self._target.read([*(each.name for each in self._targets), *computed])
        for transfer in self._cast:
            for _ in transfer.array.part(transfer.box).panels(_CHECKED):
                pass

    def stage(self, transfer: Transfer, values: Array) -> None:
        """Adds values that have come from another process."""
        self._received.append((transfer, values))

    def finish(self) -> None:
        """Computes all that is new; nothing is written yet.

        Raises:
            LossyCastError: A value becomes infinite.
        """
        reads = []
        for transfer, values in self._received:
            transfer.array.parts[transfer.box] = LazyArray.of(values)
        for target in self._targets:
            if target.shared is not None:
                self._new[target.number] = self._arrays[target.shared]
            elif not (target.is_copied and self._is_written):
                for box in target.boxes:
                    key, count = (target.name, box), 1 if target.in_place else 2
                    slot = self._slots.get(key, box_shape(box), target.array.dtype, count)
                    self._memory[key] = slot
                    reads.append((target.array, box, slot))
        fill(reads)
        for group in self._computed:
            self._new |= zip(group.numbers, group(self._arrays), strict=True)
        if self._is_written and self._target is not None:
            self._prepare(self._target)

    def _prepare(self, end: End) -> None:
        """Makes the new arrays, and collects what is written into the old ones."""
        taken: dict[tuple[Arrays, Any], list[tuple[_Target, Box]]] = {}
        written: list[tuple[Any, LazyArray, Box]] = []
        for target in self._targets:
            parts = {} if target.shared is not None else end.parts(target.name, self._old)
            for box, part in parts.items():
                if target.is_copied:
                    written.append((part, target.array, box))
                elif target.writable:
                    values = self._memory[target.name, box]
                    written.append((part, LazyArray.of(values), full_box(values.shape)))
                elif target.in_place:
                    pair = part, self._memory[target.name, box]
                    self._changed.setdefault(owner_of(part), []).append(pair)
                else:
                    adapter = owner_of(part)
                    taken.setdefault((adapter, adapter.device(part)), []).append((target, box))
            if target.in_place:
                array = self._old[target.number]
                self._written.setdefault(owner_of(array), []).append(array)
        hosts = on_host([part for part, _, _ in written])
        self._copies = [(x, box, host) for (_, x, box), host in zip(written, hosts, strict=True)]
        joined: dict[int, dict[Box, Any]] = {}
        for (adapter, device), places in taken.items():
            data = [self._memory[target.name, box] for target, box in places]
            new = adapter.take(Exchange(data, private=range(len(data))), device, share=False)
            for (target, box), array in zip(places, new, strict=True):
                joined.setdefault(target.number, {})[box] = array
        for number, parts in joined.items():
            place, (new, *_) = end.places[number], parts.values()
            if isinstance(place.adapter, Meshes) and place.layout is not None:
                mesh, spec = place.layout
                new = place.adapter.join(place.shape, mesh, spec, parts)
            self._new[number] = owner_of(new).like(new, self._old[number])
        for number in [number for group in self._computed for number in group.numbers]:
            array = self._old[number]
            if not owner_of(array).frozen:
                pair = array, self._new.pop(number)
                self._changed.setdefault(owner_of(array), []).append(pair)
                self._written.setdefault(owner_of(array), []).append(array)

    def commit(self) -> Any:
        """Writes everything into the target, and returns it."""
        from fmapper.moves.inplace import without_interrupt

        without_interrupt(self._write)
        return self._target and self._target.tree

    def _write(self) -> None:
        fill(self._copies)
        for adapter, pairs in self._changed.items():
            adapter.overwrite(*zip(*pairs, strict=True))
            for device in {adapter.device(array) for array, _ in pairs}:
                adapter.wait(device, None)  # the values may be memory of another framework
        for adapter, arrays in self._written.items():
            adapter.note_writes(arrays)
        if self._target is not None:
            self._target.write(self._new)

    def parts(self) -> Iterator[tuple[str, Box, Array]]:
        """Yields the parts of the target with their values, in memory of the sync."""
        values = [(*key, array) for key, array in self._memory.items()]
        for group in self._computed:
            for name, number in zip(group.names, group.numbers, strict=True):
                held = parts_of(self._new[number])
                hosts = on_host([*held.values()])
                values += [(name, box, x) for box, x in zip(held, hosts, strict=True)]
        return iter(values)


def _share(name: str, array: LazyArray, source: End, target: End) -> int | None:
    """Returns the number of the array of the source that an array of the target may be."""
    if not isinstance(array, Input) or array.steps or array.name not in source.held:
        return None
    if source.held[array.name].boxes != target.held[name].boxes:
        return None
    number = source.numbers[array.name]
    if not source.places[number].adapter.frozen:
        raise SyncError(
            f"{array.name}: share=True, but this array can be written to, which would change the "
            "running model at any time. Leave out share=True"
        )
    return number if source.places[number] == target.places[target.numbers[name]] else None
