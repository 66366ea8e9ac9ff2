"""The part of a sync in one process: reads, computes, and puts arrays into the target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.arrays import Arrays, Exchange
from fmapper.backends.discovery import owner_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints.boxes import Box, box_shape
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import SyncError
from fmapper.moves.view_ties import addresses, has_overlap, ties_of
from fmapper.sync.inputs import Input, leaves_of, reads_of
from fmapper.sync.memory import Slots, Values, fill, is_writable, on_host, parts_of
from fmapper.sync.on_device import OnDevice

if TYPE_CHECKING:
    import numpy as np

    from fmapper.sync.ends import End
    from fmapper.sync.planning import Transfer

    Array = np.ndarray[Any, Any]

_CHECKED = 1 << 20  # bytes that are cast at a time to see whether they can be


class _Part(NamedTuple):
    name: str  # of an array of the target
    number: int
    box: Box  # of it that is here
    dtype: Any
    reads: list[tuple[Any, LazyArray]]
    in_place: bool  # it gets new values, and is not replaced
    writable: bool  # its memory can be written to from the host
    abstract: bool  # it has no memory
    is_copied: bool  # parts of the source are copied into it as they are


class Here:
    """The reads, computations and writes of one process; an end that is not there is None."""

    def __init__(
        self,
        source: End | None,
        target: End | None,
        arrays: Mapping[str, LazyArray],  # of the target by name, made of inputs
        computed: Mapping[str, LazyArray],  # where they and their sources lie, made of leaves
        sent: Sequence[Transfer],  # to other processes
        came: Sequence[Values],  # from them
        *,
        share: bool,
    ) -> None:
        self._source, self._target, self._slots = source, target, Slots()
        self._computed: list[OnDevice] = []
        self._values = [*came]
        self._cast = [x.array.part(x.box) for x in sent if x.array.steps]
        self._shared: dict[int, int] = {}  # numbers of the target and of the source
        inputs = {transfer.array: None for transfer in sent}
        here = target.held if target is not None else {}
        for name in filter(here.__contains__, arrays):
            if share and source is not None and target is not None:
                self._shared |= _share(name, arrays[name], source, target)
            inputs |= dict.fromkeys(leaves_of(arrays[name]))
        if source is not None and target is not None:
            groups: dict[Hashable, dict[str, LazyArray]] = {}
            for name in filter(here.__contains__, computed):
                adapter = target.places[target.numbers[name]].adapter
                groups.setdefault((adapter, here[name].domain), {})[name] = computed[name]
            self._computed = [OnDevice(source, target, group) for group in groups.values()]
        if source is not None:
            leaves = [name for group in self._computed for name in group.leaves]
            source.watch([*(x.name for x in inputs if x.name in source.held), *leaves])
            self._values += source.supply(inputs)
        self._parts = [] if target is None else [*_parts_of(target, arrays, self._shared)]
        self._staged = [part for part in self._parts if not part.is_copied]
        self._written = [part for part in self._parts if part.writable]
        self._others = [x for x in self._staged if x.in_place and not x.writable]
        self._abstract = next((part.name for part in self._parts if part.abstract), "")
        self._held = next((x.name for x in self._parts if x.in_place and not x.abstract), "")
        self._taken: dict[tuple[Arrays, Any], list[_Part]] = {}
        self._noted: dict[Arrays, list[int]] = {}
        self._mutable: list[int] = []  # what is written to, then what else could be
        self._read = _mutable(source) if source is not None else []
        self._addresses: list[Any] = []
        if target is not None:
            self._plan(target)
            self._check_memory(target.arrays, [] if source is None else source.arrays)
        self.nbytes = sum(group.nbytes for group in self._computed)  # of the target, here
        self.nbytes += sum(math.prod(box_shape(x.box)) * x.dtype.itemsize for x in self._parts)
        self.release()

    def _plan(self, end: End) -> None:
        names = {number: name for name, number in reversed(end.numbers.items())}
        numbers = [*dict.fromkeys(part.number for part in self._parts)]
        numbers += [number for group in self._computed for number in group.numbers]
        places = ((names[number], end.places[number]) for number in numbers)
        self._dtypes = {place[:2]: name for name, place in places if place.adapter.frozen}
        for number in filter({*_mutable(end)}.__contains__, numbers):
            self._noted.setdefault(end.places[number].adapter, []).append(number)
        self._mutable = [*dict.fromkeys([*itertools.chain(*self._noted.values()), *_mutable(end)])]
        end.watch(names[number] for number in (*numbers, *self._shared))
        self._names = names
        new = [part for part in self._staged if not part.in_place]
        parts = (self._written, self._others, new)
        *self._writes, held = ([*dict.fromkeys(part.number for part in each)] for each in parts)
        for part, array in zip(new, end.parts(held, end.arrays), strict=True):
            key = owner_of(array), owner_of(array).device(array)
            self._taken.setdefault(key, []).append(part)

    def _check_memory(self, old: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Refuses memory that is written in place and is that of another array, too."""
        held = [old[number] for number in self._mutable]
        every = held + [arrays[number] for number in self._read]
        if not held or (now := addresses(every)) == self._addresses:
            return
        written = sum(map(len, self._noted.values()))
        for at in filter(lambda at: has_overlap(old[at]), self._mutable[:written]):
            raise SyncError(f"{self._names[at]}: it has several elements in one place; pass a copy")
        for pair in ties_of(every):
            if min(pair) >= written:
                continue
            names = [self._names[self._mutable[at]] for at in pair if at < len(held)]
            if not names[1:]:
                raise SyncError(
                    f"{names[0]}: source and target share memory that is written in place. Pass a "
                    "target of its own, such as copy.deepcopy of the source"
                )
            text = f"{names[0]} and {names[1]} of the target have elements in common"
            raise SyncError(f"{text}. Pass copies of them")
        self._addresses = now

    def release(self) -> None:
        """Drops the references to the values of a call."""
        for values in self._values:
            values.array = None
        self._arrays: list[Any] = []  # of the source
        self._old: list[Any] = []  # those of the target
        self._memory: dict[tuple[str, Box], Array] = {}
        self._new: dict[int, Any] = {}
        self._hosts: list[Array] = []  # what is written to
        self._changed: dict[Arrays, list[tuple[Any, Any]]] = {}

    def begin(self, tree: Any, *, is_written: bool) -> None:
        """Reads both ends, and checks them and the values that are to be sent."""
        if is_written and self._abstract:
            raise SyncError(f"{self._abstract}: the target has no memory there; use sync.parts()")
        if not is_written and self._held:
            raise SyncError(
                f"{self._held}: the target has memory, which a call writes to. Pass one without, "
                "such as tensors on the device meta"
            )
        self._is_written = is_written
        if self._source is not None:
            self._arrays = self._source.read(tree)
        if self._target is not None:
            self._old = self._target.read()
            self._check_memory(self._old, self._arrays)
        for array in self._cast:
            for _ in array.panels(_CHECKED):
                pass

    def finish(self) -> None:
        """Computes all that is new; nothing is written yet."""
        reads: list[tuple[Array, LazyArray]] = []
        for part in self._staged if self._is_written else self._parts:
            key, count = (part.name, part.box), 1 if part.in_place else 2
            self._memory[key] = slot = self._slots.get(key, box_shape(part.box), part.dtype, count)
            reads += ((slot[index], array) for index, array in part.reads)
        fill(reads)
        self._new = {number: self._arrays[at] for number, at in self._shared.items()}
        for group in self._computed:
            self._new |= zip(group.numbers, group(self._arrays), strict=True)
        if self._is_written and self._target is not None:
            self._prepare(self._target)

    def _prepare(self, end: End) -> None:
        """Makes the new arrays, and collects what is written into the old ones."""
        for (adapter, dtype), name in self._dtypes.items():
            if (narrow := adapter.storable(dtype)) != dtype:
                raise SyncError(
                    f"{name}: {dtype} of the target would become {narrow}. Enable it for the call, "
                    f"too: {adapter.widened_by}"
                )
        private: list[int] = []
        hosts = on_host(end.parts(self._writes[0], self._old), private)
        read_only = (at for at, host in enumerate(hosts) if not host.flags.writeable)
        for at in itertools.chain(private, read_only):
            name = self._written[at].name
            raise SyncError(f"{name}: the array of the target cannot be written to any more")
        self._hosts = hosts
        for part, array in zip(self._others, end.parts(self._writes[1], self._old), strict=True):
            pair = array, self._memory[part.name, part.box]
            self._changed.setdefault(owner_of(array), []).append(pair)
        joined: dict[int, dict[Box, Any]] = {}
        for (adapter, device), taken in self._taken.items():
            data = [self._memory[part.name, part.box] for part in taken]
            new = adapter.take(Exchange(data, private=range(len(data))), device, share=False)
            for part, array in zip(taken, new, strict=True):
                joined.setdefault(part.number, {})[part.box] = array
        for number, pieces in joined.items():
            place, (new, *_) = end.places[number], pieces.values()
            if isinstance(place.adapter, Meshes) and place.layout is not None:
                mesh, spec = place.layout
                new = place.adapter.join(place.shape, mesh, spec, pieces)
            self._new[number] = owner_of(new).like(new, self._old[number])
        for number in [number for group in self._computed for number in group.numbers]:
            array = self._old[number]
            if not owner_of(array).frozen:
                pair = array, self._new.pop(number)
                self._changed.setdefault(owner_of(array), []).append(pair)

    def commit(self) -> Any:
        """Writes everything into the target, and returns it."""
        from fmapper.moves.inplace import without_interrupt

        without_interrupt(self._write)
        return self._target and self._target.tree

    def _write(self) -> None:
        if self._target is not None:
            self._target.write(self._new)  # it may fail, and changes nothing then
        fill(
            (host[index], array)
            for part, host in zip(self._written, self._hosts, strict=True)
            for index, array in (part.reads if part.is_copied else self._read_memory(part))
        )
        for adapter, pairs in self._changed.items():
            adapter.overwrite(*zip(*pairs, strict=True))
            for device in {adapter.device(array) for array, _ in pairs}:
                adapter.wait(device, None)  # the values may be memory of another framework
        for adapter, numbers in self._noted.items():
            adapter.note_writes([self._old[number] for number in numbers])

    def _read_memory(self, part: _Part) -> list[tuple[Any, LazyArray]]:
        return [(..., LazyArray.of(self._memory[part.name, part.box]))]

    def parts(self) -> Iterator[tuple[str, Box, Array]]:
        """Yields the parts of the target with their values, in memory of the sync."""
        values = [(*key, array) for key, array in self._memory.items()]
        for number, array in self._new.items():
            held, name = parts_of(array), self._names[number]
            hosts = on_host([*held.values()])
            values += [(name, box, x) for box, x in zip(held, hosts, strict=True)]
        return iter(values)


def _parts_of(
    end: End, arrays: Mapping[str, LazyArray], shared: Mapping[int, int]
) -> Iterator[_Part]:
    """Yields the parts of a target that are here, but of arrays that are shared."""
    for name in filter(end.held.__contains__, arrays):
        number, array = end.numbers[name], arrays[name]
        place, parts = end.places[number], end.parts([number], end.arrays)
        writable, abstract = all(is_writable(x, name) for x in parts), place.device.kind == "meta"
        is_copied = writable and isinstance(array, Input) and not array.steps
        ways = not place.adapter.frozen, writable, abstract, is_copied
        for box in () if number in shared else itertools.chain(*end.held[name].boxes.values()):
            yield _Part(name, number, box, array.dtype, reads_of(array, box), *ways)


def _mutable(end: End) -> list[int]:
    """Returns the numbers of arrays that can be written to."""
    every = dict.fromkeys(end.numbers.values())
    return [number for number in every if not end.places[number].adapter.frozen]


def _share(name: str, array: LazyArray, source: End, target: End) -> dict[int, int]:
    """Returns the number of a target's array with that of the source's array that it may be."""
    if not isinstance(array, Input) or array.steps or array.name not in source.held:
        return {}
    if source.held[array.name].boxes != target.held[name].boxes:
        return {}
    number, own = source.numbers[array.name], target.numbers[name]
    if not source.places[number].adapter.frozen:
        raise SyncError(
            f"{array.name}: share=True, but this array can be written to, which would change the "
            "running model at any time. Leave out share=True"
        )
    return {own: number} if source.places[number] == target.places[own] else {}
