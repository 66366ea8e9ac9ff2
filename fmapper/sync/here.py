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


class _Target(NamedTuple):
    """An array of the target."""

    name: str
    number: int  # in the end
    array: LazyArray  # what it is made of
    boxes: tuple[Box, ...]  # its parts that are here
    in_place: bool  # it gets new values, and is not replaced
    writable: bool  # its memory can be written to from the host
    abstract: bool  # it has no memory
    shared: str  # the array of the source that takes its place; empty if none does

    @property
    def is_copied(self) -> bool:
        """Whether parts of the source are copied into it as they are."""
        return self.writable and isinstance(self.array, Input) and not self.array.steps


class Here:
    """What a process reads, computes, sends and writes.

    Args:
        source: The end that is read; None if it is in other processes.
        target: The end that is written; None if it is in other processes.
        arrays: The arrays of the target by name, made of inputs.
        computed: Those that are computed where they and their sources lie, made of leaves.
        sent: What goes to other processes.
        share: Let arrays be those of the source where these are right as they are.
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
        self.source, self.target, self.slots = source, target, Slots()
        self.targets: list[_Target] = []
        self.computed: list[OnDevice] = []
        self._sent = [transfer for transfer in sent if transfer.array.steps]
        held = {} if target is None else target.held
        here = {name: array for name, array in arrays.items() if name in held}
        if target is not None:
            shared = _find_shared(source, target, here) if share and source is not None else {}
            for name, array in here.items():
                number, (boxes,) = target.number(name), held[name].boxes.values()
                place = target.places[number]
                is_in_place, is_abstract = not place.adapter.frozen, place.device.kind == "meta"
                writable = all(map(is_writable, target.parts(number, target.arrays).values()))
                how = is_in_place, writable, is_abstract, shared.get(name, "")
                self.targets.append(_Target(name, number, array, boxes, *how))
        if source is not None and target is not None:
            groups: dict[Hashable, dict[str, LazyArray]] = {}
            for name, array in computed.items():
                if name in held:
                    adapter = target.places[target.number(name)].adapter
                    groups.setdefault((adapter, held[name].domain), {})[name] = array
            self.computed = [OnDevice(source, target, group) for group in groups.values()]
        inputs = {leaf: None for array in here.values() for leaf in leaves_of(array)}
        inputs |= {transfer.array: None for transfer in sent}
        self.inputs = [*inputs]
        read = {leaf.name: None for leaf in self.inputs if source and leaf.name in source.held}
        self.read = [*read]
        self.nbytes = sum(group.nbytes for group in self.computed)
        for each in self.targets:
            elements = sum(math.prod(box_shape(box)) for box in each.boxes)
            self.nbytes += elements * each.array.dtype.itemsize

    def begin(self, tree: Any, *, is_written: bool) -> Round:
        """Reads both ends.

        Raises:
            SyncError: One is not as planned, or the target has no memory although it is written,
                or has some although it is not.
            LossyCastError: A value that is to be sent becomes infinite.
        """
        for target in self.targets:
            if is_written and target.abstract:
                raise SyncError(f"{target.name}: the target has no memory there; use sync.parts()")
            if not is_written and target.in_place and not target.abstract:
                raise SyncError(
                    f"{target.name}: the target has memory, which a call writes to. Pass one "
                    "without, such as tensors on the device meta"
                )
        computed = [name for group in self.computed for name in group.names]
        arrays, old = [], []
        if self.source is not None:
            leaves = {name for group in self.computed for name in group.leaves}
            arrays = self.source.read([*self.read, *leaves], tree)
            parts = {n: self.source.parts(self.source.number(n), arrays) for n in self.read}
            hosts = iter(on_host([part for each in parts.values() for part in each.values()]))
            values = {n: {box: next(hosts) for box in each} for n, each in parts.items()}
            for leaf in self.inputs:
                held = values.get(leaf.name, {}).items()
                leaf.parts = {box: with_steps(LazyArray.of(x), leaf.steps) for box, x in held}
        if self.target is not None:
            old = self.target.read([*(target.name for target in self.targets), *computed])
        for transfer in self._sent:
            for _ in transfer.array.part(transfer.box).panels(_CHECKED):
                pass
        return Round(self, arrays, old, is_written=is_written)

    def release(self) -> None:
        """Drops the references to the values of a call."""
        for leaf in self.inputs:
            leaf.parts = {}


_CHECKED = 1 << 20  # bytes that are cast at a time to see whether they can be


class Round:
    """One call of a sync in a process."""

    def __init__(
        self, here: Here, arrays: Sequence[Any], old: Sequence[Any], *, is_written: bool
    ) -> None:
        self._here, self._arrays, self._old, self._is_written = here, arrays, old, is_written
        self._received: list[tuple[Transfer, Array]] = []
        self._memory: dict[tuple[str, Box], Array] = {}
        self._new: dict[int, Any] = {}
        self._changed: dict[Arrays, list[tuple[Any, Any]]] = {}
        self._written: dict[Arrays, list[Any]] = {}
        self._copies: list[tuple[LazyArray, Box, Array]] = []

    def stage(self, transfer: Transfer, values: Array) -> None:
        """Adds values that have come from another process."""
        self._received.append((transfer, values))

    def finish(self) -> None:
        """Computes all that is new; nothing is written yet.

        Raises:
            LossyCastError: A value becomes infinite.
        """
        here, reads = self._here, []
        for transfer, values in self._received:
            transfer.array.parts[transfer.box] = LazyArray.of(values)
        for target in here.targets:
            if target.shared and here.source is not None:
                self._new[target.number] = self._arrays[here.source.number(target.shared)]
            elif not (target.is_copied and self._is_written):
                for box in target.boxes:
                    key, count = (target.name, box), 1 if target.in_place else 2
                    slot = here.slots.get(key, box_shape(box), target.array.dtype, count)
                    self._memory[key] = slot
                    reads.append((target.array, box, slot))
        fill(reads)
        for group in here.computed:
            self._new |= zip(group.numbers, group(self._arrays), strict=True)
        if self._is_written and here.target is not None:
            self._prepare(here.target)

    def _prepare(self, end: End) -> None:
        """Makes the new arrays, and collects what is written into the old ones."""
        taken: dict[tuple[Arrays, Any], list[tuple[_Target, Box]]] = {}
        written: list[tuple[Any, LazyArray, Box]] = []
        for target in self._here.targets:
            parts = {} if target.shared else end.parts(target.number, self._old)
            for box, part in parts.items():
                if target.is_copied:
                    written.append((part, target.array, box))
                elif target.writable:
                    values = self._memory[target.name, box]
                    written.append((part, LazyArray.of(values), full_box(values.shape)))
                elif target.in_place:
                    self._change(part, self._memory[target.name, box])
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
            self._new[number] = _join(self._old[number], parts)
        for group in self._here.computed:
            for number in group.numbers:
                array = self._old[number]
                if not owner_of(array).frozen:
                    self._change(array, self._new.pop(number))
                    self._written.setdefault(owner_of(array), []).append(array)

    def _change(self, array: Any, values: Any) -> None:
        self._changed.setdefault(owner_of(array), []).append((array, values))

    def commit(self) -> Any:
        """Writes everything into the target, and returns it."""
        from fmapper.moves.inplace import without_interrupt

        target = self._here.target
        if target is None:
            return None
        without_interrupt(self._write)
        return target.tree

    def _write(self) -> None:
        fill(self._copies)
        for adapter, pairs in self._changed.items():
            adapter.overwrite(*zip(*pairs, strict=True))
            for device in {adapter.device(array) for array, _ in pairs}:
                adapter.wait(device, None)  # the values may be memory of another framework
        for adapter, arrays in self._written.items():
            adapter.note_writes(arrays)
        assert self._here.target is not None
        self._here.target.write(self._new)

    def parts(self) -> Iterator[tuple[str, Box, Array]]:
        """Yields the parts of the target with their values, in memory of the sync."""
        for (name, box), array in self._memory.items():
            yield name, box, array
        for group in self._here.computed:
            for name, number in zip(group.names, group.numbers, strict=True):
                held = parts_of(self._new[number])
                for box, values in zip(held, on_host([*held.values()]), strict=True):
                    yield name, box, values


def _join(old: Any, parts: Mapping[Box, Any]) -> Any:
    """Joins parts into an array with the layout of an old one."""
    adapter = owner_of(old)
    layout = adapter.layout(old) if isinstance(adapter, Meshes) else None
    if layout is None:
        (new,) = parts.values()
        return adapter.like(new, old)
    assert isinstance(adapter, Meshes)
    return owner_of(old).like(adapter.join(owner_of(old).shape(old), *layout, parts), old)


def _find_shared(source: End, target: End, arrays: Mapping[str, LazyArray]) -> dict[str, str]:
    """Returns the arrays of the target that are one of the source as it is.

    Raises:
        SyncError: An array of the source can be written to, which would change both.
    """
    shared: dict[str, str] = {}
    for name, array in arrays.items():
        if not isinstance(array, Input) or array.steps:
            continue
        if source.held.get(array.name, ((), "", {}))[2] != target.held[name].boxes:
            continue
        place = source.places[source.number(array.name)]
        if not place.adapter.frozen:
            raise SyncError(
                f"{array.name}: share=True, but this array can be written to, which would change "
                "the running model at any time. Leave out share=True"
            )
        if place == target.places[target.number(name)]:
            shared[name] = array.name
    return shared
