"""What a sync does in one process: reads, copies, and puts arrays into the target."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.arrays import Device, Exchange
from fmapper.backends.discovery import owner_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints.boxes import Box, box_shape
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.errors import SyncError
from fmapper.moves.inplace import without_interrupt
from fmapper.sync.copies import Copy, Slots, carry_out, check, view_of
from fmapper.sync.ends import End, on_host, parts_of
from fmapper.sync.planning import STAGED, Part, Transfer
from fmapper.sync.strided import Leaf

if TYPE_CHECKING:
    import numpy as np

    from fmapper.sync.strided import View

    Array = np.ndarray[Any, Any]


class _Target(NamedTuple):
    """An array of the target.

    Attributes:
        name: Its name.
        number: Its number in the end.
        boxes: Its parts that are here.
        in_place: Whether it gets new values, instead of being replaced.
        writable: Whether its memory can be written to from the host.
        shared: The array of the source that may take its place as it is; empty if none may.
    """

    name: str
    number: int
    boxes: tuple[Box, ...]
    in_place: bool
    writable: bool
    shared: str


class Here:
    """The copies between arrays of one process, and those from and to what is sent."""

    def __init__(
        self,
        source: End | None,
        target: End | None,
        transfers: Sequence[Transfer],
        rank: int,
        *,
        share: bool,
    ) -> None:
        self.source, self.target, self.rank = source, target, rank
        self._sources = _names(t.source for t in transfers if t.sender == rank)
        self.transfers = transfers
        self.slots = Slots()
        self.targets: list[_Target] = []
        self.staged: dict[str, Box] = {}
        if target is None:
            return
        names = _names(t.target for t in transfers if t.receiver == rank)
        for name in [name for name in names if name.startswith(STAGED)]:
            (box,) = names.pop(name)
            self.staged[name] = box
            dtype = next(t.piece.leaf.dtype for t in transfers if t.target.name == name)
            self.slots.reserve((name, box), box_shape(box), dtype)
        shared = _shared(source, target, transfers, rank) if share else {}
        for name, boxes in names.items():
            number = target.number(name)
            array = target.arrays[number]
            adapter = owner_of(array)
            held = parts_of(array)
            writable = not adapter.frozen and all(map(_is_writable, held.values()))
            known = _Target(
                name, number, tuple(boxes), not adapter.frozen, writable, shared.get(name, "")
            )
            self.targets.append(known)
            for box in known.boxes:
                if not writable:
                    self.slots.reserve((name, box), *_outline(held[box]))

    def begin(self, tree: Any) -> Round:
        """Reads both ends, and checks that they are as planned."""
        return Round(self, self._read(tree))

    def _read(self, tree: Any) -> dict[Part, Array]:
        if self.source is None:
            return {}
        arrays = self.source.read(tree)
        places: list[Part] = []
        parts: list[Any] = []
        for name, boxes in self._sources.items():
            array = arrays[self.source.number(name)]
            held = parts_of(array)
            for box in boxes:
                if box not in held:
                    raise SyncError(f"{name} {_OTHER}: its shape, or how it is sharded")
                places.append(Part(name, box))
                parts.append(held[box])
        hosts, _ = on_host(parts)
        for place, host in zip(places, hosts, strict=True):
            dtype = self.source.held[place.name].dtype
            if host.dtype.name != dtype:
                raise SyncError(f"{place.name} {_OTHER}: its dtype, {dtype}, is {host.dtype.name}")
        return dict(zip(places, hosts, strict=True))


_OTHER = "is not as it was when the sync was planned"


class Round:
    """One call of a sync in a process.

    Attributes:
        nbytes: Bytes of the target that are written here.
    """

    def __init__(self, here: Here, sources: Mapping[Part, Array]) -> None:
        self._here, self.sources = here, sources
        self.memory: dict[Part, Array] = {}
        self._news: list[tuple[_Target, Any]] = []
        self._old: list[Any] = []
        self._given: dict[int, Any] = {}
        self._staged: list[Copy] = []
        self._copies: list[Copy] = []
        self._computed: dict[LazyArray, Array] = {}
        self.nbytes = 0
        if here.target is not None:
            self._find_memory(here.target)
        check(self._cast(t for t in here.transfers if not _is_computed(t)))

    def _find_memory(self, target: End) -> None:
        """Finds the memory of each part of the target: its own, or that of a slot."""
        here = self._here
        self._old = target.read()
        shared = {} if here.source is None else dict(enumerate(here.source.read()))
        places: list[Part] = []
        parts: list[Any] = []
        for known in here.targets:
            array = self._old[known.number]
            source = here.source
            if known.shared and source is not None:
                new = shared[source.number(known.shared)]
                if _is_alike(new, array):
                    self._given[known.number] = new
                    continue
            held = parts_of(array)
            for box in known.boxes:
                if box not in held:
                    raise SyncError(f"{known.name} of the target {_OTHER}")
                part = Part(known.name, box)
                if known.writable:
                    places.append(part)
                    parts.append(held[box])
                else:
                    self.memory[part] = here.slots.get((known.name, box))
            if not known.writable:
                self._news.append((known, array))
        self.memory |= zip(places, on_host(parts)[0], strict=True)
        self.nbytes = sum(array.nbytes for array in self.memory.values())
        for name, box in here.staged.items():
            self.memory[Part(name, box)] = here.slots.get((name, box))

    def _cast(self, transfers: Iterable[Transfer]) -> Iterator[tuple[Array, Any, str]]:
        for t in transfers:
            if t.sender == self._here.rank and t.piece.steps:
                yield view_of(self.source_of(t), t.froms), t.piece.steps, t.target.name

    def _local(self, transfers: Iterable[Transfer]) -> Iterator[Copy]:
        for t in transfers:
            memory = self.memory.get(t.target)
            if t.sender == t.receiver == self._here.rank and memory is not None:
                source = view_of(self.source_of(t), t.froms)
                yield Copy(view_of(memory, t.to), source, t.piece.steps, t.target.name)

    def source_of(self, transfer: Transfer) -> Array:
        """Returns the array that a transfer takes elements of."""
        if transfer.source is not None:
            return self.sources[transfer.source]
        leaf = transfer.piece.leaf
        if leaf not in self._computed:
            arrays = {
                name.removeprefix(STAGED): self.memory[Part(name, box)]
                for name, box in self._here.staged.items()
            }
            self._computed[leaf] = _with_values(leaf, arrays).read()
        return self._computed[leaf]

    def finish(self) -> None:
        """Computes arrays of which all operands are there.

        Raises:
            LossyCastError: A value becomes infinite.
        """
        staged = [t for t in self._here.transfers if t.target.name.startswith(STAGED)]
        arrived = [copy for copy in self._staged if copy.name.startswith(STAGED)]
        carry_out([*self._local(staged), *arrived])
        check(self._cast(filter(_is_computed, self._here.transfers)))
        others = [t for t in self._here.transfers if not t.target.name.startswith(STAGED)]
        self._copies = [*self._local(others)]
        self._copies += [copy for copy in self._staged if not copy.name.startswith(STAGED)]

    def memory_of(self, transfer: Transfer) -> Array:
        """Returns the values that the target has where a transfer goes."""
        part = transfer.target
        known = next(known for known in self._here.targets if known.name == part.name)
        (host,), _ = on_host([parts_of(self._old[known.number])[part.box]])
        return host

    def stage(self, target: Part, to: View, data: Array) -> None:
        """Adds values that have come from another process, for the commit."""
        memory = self.memory.get(target)
        if memory is not None:
            self._staged.append(Copy(view_of(memory, to), data, (), target.name))

    def commit(self) -> Any:
        """Writes everything into the target, and returns it."""
        target = self._here.target
        if target is None:
            return None
        without_interrupt(lambda: carry_out(self._copies))
        new = dict(self._given)
        for known, array in self._news:
            if known.in_place:
                for box, part in parts_of(array).items():
                    owner_of(part).overwrite(part, self.memory[Part(known.name, box)])
            else:
                new[known.number] = self._made(known, array)
        written = [self._old[known.number] for known in self._here.targets if known.in_place]
        for adapter in {owner_of(array) for array in written}:
            adapter.note_writes([array for array in written if owner_of(array) is adapter])
        return target.write(new)

    def _made(self, known: _Target, old: Any) -> Any:
        """Returns the new array of a framework that takes over memory of the host."""
        adapter = owner_of(old)
        parts = {box: self.memory[Part(known.name, box)] for box in known.boxes}
        layout = adapter.layout(old) if isinstance(adapter, Meshes) else None
        if layout is None:
            (data,) = parts.values()
            (new,) = adapter.take(Exchange([data], private=(0,)), adapter.device(old), share=False)
            return adapter.like(new, old)
        held = parts_of(old)
        taken = {
            box: next(iter(adapter.take(Exchange([data], private=(0,)), _device(held[box]), share=False)))
            for box, data in parts.items()
        }
        assert isinstance(adapter, Meshes)
        return adapter.like(adapter.join(adapter.shape(old), *layout, taken), old)


def _is_computed(transfer: Transfer) -> bool:
    return transfer.source is None


def _with_values(array: LazyArray, arrays: Mapping[str, Array]) -> LazyArray:
    """Returns a lazy array with values for its leaves."""
    if isinstance(array, Leaf):
        return LazyArray.of(arrays[array.name])
    if not isinstance(array, Operation):
        return array
    new = copy.copy(array)
    new.operands = tuple(_with_values(operand, arrays) for operand in array.operands)
    return new


def _device(array: Any) -> Device:
    return owner_of(array).device(array)


def _names(parts: Iterable[Part | None]) -> dict[str, dict[Box, None]]:
    found: dict[str, dict[Box, None]] = {}
    for part in parts:
        if part is not None:
            found.setdefault(part.name, {})[part.box] = None
    return found


def _outline(array: Any) -> tuple[tuple[int, ...], Any]:
    from fmapper.files.dtypes import numpy_dtype

    adapter = owner_of(array)
    return tuple(adapter.shape(array)), numpy_dtype(adapter.dtype(array))


def _is_writable(array: Any) -> bool:
    """Returns whether the memory of an array can be written to from the host."""
    (host,), apart = on_host([array])
    return not apart and bool(host.flags.writeable)


def _is_alike(new: Any, old: Any) -> bool:
    """Returns whether an array lies as another one does, so that it can take its place."""
    adapter = owner_of(new)
    if adapter is not owner_of(old) or adapter.device(new) != adapter.device(old):
        return False
    return not isinstance(adapter, Meshes) or adapter.layout(new) == adapter.layout(old)


def _shared(
    source: End | None, target: End, transfers: Sequence[Transfer], rank: int
) -> dict[str, str]:
    """Returns the arrays of the target that are one of the source as it is.

    Raises:
        SyncError: An array of the source can be written to, which would change both.
    """
    found: dict[str, str] = {}
    for name in target.held:
        own = [t for t in transfers if t.target.name == name and t.receiver == rank]
        froms = {t.source.name for t in own if t.source is not None}
        if len(froms) != 1 or source is None:
            continue
        (first,) = froms
        array = source.arrays[source.number(first)]
        is_same = all(t.froms == t.to and not t.piece.steps and t.source for t in own)
        boxes = {t.target.box for t in own} == {t.source.box for t in own if t.source}
        if not (is_same and boxes):
            continue
        if not owner_of(array).frozen:
            raise SyncError(
                f"{first}: share=True, but this array can be written to, which would change the "
                "running model at any time. Leave out share=True"
            )
        found[name] = first
    return found
