"""The part of a sync in one process: reads, copies, and puts arrays into the target."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.arrays import HOST, Arrays, Exchange
from fmapper.backends.discovery import owner_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints.boxes import Box, box_shape
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.errors import SyncError
from fmapper.files.dtypes import numpy_dtype
from fmapper.sync.copies import Copy, Slots, carry_out, check, make_copy, view_of
from fmapper.sync.memory import Memory, is_writable, on_host, parts_of
from fmapper.sync.planning import STAGED, Part, Transfer
from fmapper.sync.strided import Leaf

if TYPE_CHECKING:
    import numpy as np

    from fmapper.sync.ends import End
    from fmapper.sync.on_device import OnDevice

    Array = np.ndarray[Any, Any]


class _Target(NamedTuple):
    """An array of the target."""

    name: str
    number: int  # in the end
    boxes: tuple[Box, ...]  # its parts that are here
    in_place: bool  # it gets new values, and is not replaced
    writable: bool  # its memory can be written to from the host
    abstract: bool  # it has no memory
    shared: str  # the array of the source that may take its place; empty if none may


class Here:
    """The copies within a process, and those from and to its messages.

    Attributes:
        transfers: What is copied, sent and received here.
        targets: The arrays of the target that get something.
        staged: The arrays of the source that are needed whole, to compute others, with their boxes.
    """

    def __init__(
        self,
        source: End | None,
        target: End | None,
        transfers: Sequence[Transfer],
        computed: Mapping[str, LazyArray],
        rank: int,
        *,
        share: bool,
    ) -> None:
        self.source, self.target, self.rank = source, target, rank
        self.transfers = transfers
        self.slots = Slots()
        self.targets: list[_Target] = []
        self.staged: dict[str, Box] = {}
        self.copies: list[tuple[Array, Array, Copy] | None] = [None] * len(transfers)
        given = (t.source for t in transfers if t.sender == rank)
        self._from_parts = [*dict.fromkeys(part for part in given if part is not None)]
        self._sources = None if source is None else Memory(source, self._from_parts, "source")
        self._to_parts: list[Part] = []
        self._writable: Memory | None = None
        self.computed: list[OnDevice] = []
        if target is not None and source is not None and computed:
            from fmapper.sync.on_device import OnDevice

            groups: dict[Any, dict[str, LazyArray]] = {}
            for name, array in computed.items():
                if name in target.held:
                    owner = owner_of(target.arrays[target.number(name)])
                    groups.setdefault((owner, target.held[name].domain), {})[name] = array
            self.computed = [OnDevice(source, target, group) for group in groups.values()]
        if target is not None:
            mine = [t for t in transfers if t.receiver == rank]
            shared = _find_shared(source, mine) if share and source is not None else {}
            self._plan_target(target, mine, shared)

    def _plan_target(
        self, target: End, mine: Sequence[Transfer], shared: Mapping[str, str]
    ) -> None:
        boxes: dict[str, dict[Box, None]] = {}
        for t in mine:
            name, box = t.target
            if not name.startswith(STAGED):
                boxes.setdefault(name, {})[box] = None
            elif name not in self.staged:
                self.staged[name] = box
                self.slots.reserve(t.target, box_shape(box), t.piece.leaf.dtype)
        for name, needed in boxes.items():
            array = target.arrays[target.number(name)]
            adapter = owner_of(array)
            writable = all(map(is_writable, parts_of(array).values()))
            self.targets.append(
                _Target(
                    name,
                    target.number(name),
                    boxes=(*needed,),
                    in_place=not adapter.frozen,
                    writable=writable,
                    abstract=adapter.device(array).kind == "meta",
                    shared=shared.get(name, ""),
                )
            )
            for box in needed:
                if writable:
                    self._to_parts.append(Part(name, box))
                else:
                    dtype = numpy_dtype(adapter.dtype(array))
                    self.slots.reserve(Part(name, box), box_shape(box), dtype)
        self._writable = Memory(target, self._to_parts, "target")

    def begin(self, tree: Any) -> Round:
        """Reads both ends, and checks that they are as planned."""
        arrays = [] if self.source is None else self.source.read(tree)
        hosts = [] if self._sources is None else self._sources.read(arrays)
        sources = dict(zip(self._from_parts, hosts, strict=True))
        old = [] if self.target is None else self.target.read()
        memory: dict[Part, Array] = {}
        if self._writable is not None:
            memory = dict(zip(self._to_parts, self._writable.read(old), strict=True))
        return Round(self, arrays, old, sources, memory)


class Round:
    """One call of a sync in a process.

    Attributes:
        nbytes: Bytes of the target that are written here.
    """

    def __init__(
        self,
        here: Here,
        arrays: Sequence[Any],
        old: Sequence[Any],
        sources: Mapping[Part, Array],
        memory: dict[Part, Array],
    ) -> None:
        self._here, self._arrays, self._old = here, arrays, old
        self._sources, self._memory = sources, memory
        self._lasting = frozenset(memory)  # a view of a slot would count as somebody who holds it
        self._given: dict[int, Any] = {}
        self._replaced: list[_Target] = []
        self._staged: list[Copy] = []
        self._filled: list[Copy] = []  # into memory of ours
        self._copies: list[Copy] = []  # into that of the target
        self._is_written = True
        self._computed: dict[LazyArray, Array] = {}
        for target in here.targets:
            if target.shared and here.source is not None:
                new = arrays[here.source.number(target.shared)]
                if _is_alike(new, old[target.number]):
                    self._given[target.number] = new
                    continue
            if not target.writable:  # it is replaced, or on another device than the host
                self._replaced.append(target)
                for box in target.boxes:
                    memory[Part(target.name, box)] = here.slots.get(Part(target.name, box))
        self.nbytes = sum(array.nbytes for array in memory.values())
        self.nbytes += sum(group.nbytes for group in here.computed)
        for part in starmap(Part, here.staged.items()):
            memory[part] = here.slots.get(part)
        for group in here.computed:
            group.check(arrays, old)
        check(self._casts(t for t in here.transfers if t.source is not None))

    def check_target(self, *, is_written: bool) -> None:
        """Checks that the target has memory if it is written, and none otherwise.

        Raises:
            SyncError: Names an array.
        """
        self._is_written = is_written
        for target in self._here.targets:
            if is_written and target.abstract:
                raise SyncError(f"{target.name}: the target has no memory there; use sync.parts()")
            if not is_written and target.in_place and not target.abstract:
                raise SyncError(
                    f"{target.name}: the target has memory, which a call writes to. Pass one "
                    "without, such as tensors on the device meta"
                )

    def _casts(self, transfers: Iterable[Transfer]) -> Iterator[tuple[Array, Any, str]]:
        for t in transfers:
            if t.piece.steps and t.sender == self._here.rank:
                yield view_of(self.source_of(t), t.froms), t.piece.steps, t.target.name

    def _find_copies(self, *, staged: bool) -> None:
        """Adds the copies within this process, those that are known from an earlier call."""
        for at, t in enumerate(self._here.transfers):
            target = self._memory.get(t.target)  # None if it is shared
            is_staged = t.target.name.startswith(STAGED)
            if t.sender != t.receiver or is_staged != staged or target is None:
                continue
            source, last = self.source_of(t), self._here.copies[at]
            if last is not None and last[0] is source and last[1] is target:
                self._copies.append(last[2])
                continue
            made = make_copy(view_of(target, t.to), view_of(source, t.froms), t.piece.steps)
            self._copies_to(t.target).append(made)
            if t.target in self._lasting:
                self._here.copies[at] = source, target, made

    def _copies_to(self, part: Part) -> list[Copy]:
        if part.name.startswith(STAGED):
            return self._staged
        return self._copies if part in self._lasting else self._filled

    def source_of(self, transfer: Transfer) -> Array:
        """Returns the array that a transfer reads."""
        if transfer.source is not None:
            return self._sources[transfer.source]
        leaf = transfer.piece.leaf
        if leaf not in self._computed:
            parts = starmap(Part, self._here.staged.items())
            arrays = {part.name.removeprefix(STAGED): self._memory[part] for part in parts}
            self._computed[leaf] = _with_values(leaf, arrays).read()
        return self._computed[leaf]

    def values_of(self, transfer: Transfer) -> Array:
        """Returns the current values at the destination of a transfer."""
        target = self._here.target
        assert target is not None
        part = parts_of(self._old[target.number(transfer.target.name)])[transfer.target.box]
        (host,) = owner_of(part).export([part], HOST).data
        return view_of(host, transfer.to)

    def stage(self, transfer: Transfer, data: Array) -> None:
        """Adds values that have come from another process."""
        target = view_of(self._memory[transfer.target], transfer.to)
        self._copies_to(transfer.target).append(make_copy(target, data))

    def finish(self) -> None:
        """Computes all that is new; nothing is written yet.

        Raises:
            LossyCastError: A value becomes infinite.
        """
        self._find_copies(staged=True)
        carry_out(self._staged)
        check(self._casts(t for t in self._here.transfers if t.source is None))
        self._find_copies(staged=False)
        carry_out(self._filled)
        for group in self._here.computed:
            self._given |= zip(group.numbers, group(self._arrays), strict=True)
        if self._is_written:
            self._given |= self._make()

    def commit(self) -> Any:
        """Writes everything into the target, and returns it."""
        from fmapper.moves.inplace import without_interrupt

        target = self._here.target
        if target is None:
            return None
        without_interrupt(lambda: carry_out(self._copies))
        changed: dict[Arrays, list[tuple[Any, Any]]] = {}
        for written_to in self._replaced:
            if written_to.in_place:
                for box, part in parts_of(self._old[written_to.number]).items():
                    pair = part, self._memory[Part(written_to.name, box)]
                    changed.setdefault(owner_of(part), []).append(pair)
        written: dict[Arrays, list[Any]] = {}
        for written_to in self._here.targets:
            if written_to.in_place:
                array = self._old[written_to.number]
                written.setdefault(owner_of(array), []).append(array)
        new = {}
        for number, value in self._given.items():
            array = self._old[number]
            if owner_of(array).frozen:
                new[number] = value
            else:
                changed.setdefault(owner_of(array), []).append((array, value))
                written.setdefault(owner_of(array), []).append(array)
        for adapter, pairs in changed.items():
            adapter.overwrite(*zip(*pairs, strict=True))
            for device in {adapter.device(array) for array, _ in pairs}:
                adapter.wait(device, None)  # the values may be memory of another framework
        for adapter, arrays in written.items():
            adapter.note_writes(arrays)
        return target.write(new)

    def parts(self) -> Iterator[tuple[str, Box, Array]]:
        """Yields the parts of the target with their values, in memory of the sync."""
        for part, array in self._memory.items():
            if not part.name.startswith(STAGED):
                yield part.name, part.box, array
        for group in self._here.computed:
            for name, number in zip(group.names, group.numbers, strict=True):
                held = parts_of(self._given[number])
                for box, values in zip(held, on_host([*held.values()]), strict=True):
                    yield name, box, values

    def _make(self) -> dict[int, Any]:
        """Returns the new arrays of frameworks that take over memory of the host."""
        places: dict[tuple[Arrays, Any], list[tuple[_Target, Box]]] = {}
        for target in self._replaced:
            if not target.in_place:
                for box, part in parts_of(self._old[target.number]).items():
                    adapter = owner_of(part)
                    places.setdefault((adapter, adapter.device(part)), []).append((target, box))
        taken: dict[int, dict[Box, Any]] = {}
        for (adapter, device), wanted in places.items():
            data = [self._memory[Part(target.name, box)] for target, box in wanted]
            new = adapter.take(Exchange(data, private=range(len(data))), device, share=False)
            for (target, box), array in zip(wanted, new, strict=True):
                taken.setdefault(target.number, {})[box] = array
        return {number: _join(self._old[number], parts) for number, parts in taken.items()}


def _join(old: Any, parts: Mapping[Box, Any]) -> Any:
    """Joins parts into an array with the layout of an old one."""
    adapter = owner_of(old)
    layout = adapter.layout(old) if isinstance(adapter, Meshes) else None
    if layout is None:
        (new,) = parts.values()
        return adapter.like(new, old)
    assert isinstance(adapter, Meshes)
    return owner_of(old).like(adapter.join(owner_of(old).shape(old), *layout, parts), old)


def _with_values(array: LazyArray, arrays: Mapping[str, Array]) -> LazyArray:
    """Returns a lazy array with values for its leaves."""
    if isinstance(array, Leaf):
        return LazyArray.of(arrays[array.name])
    if not isinstance(array, Operation):
        return array
    new = copy.copy(array)
    new.operands = tuple(_with_values(operand, arrays) for operand in array.operands)
    return new


def _is_alike(new: Any, old: Any) -> bool:
    """Returns whether an array lies as another one does, so that it can take its place."""
    adapter = owner_of(new)
    if adapter is not owner_of(old) or adapter.device(new) != adapter.device(old):
        return False
    return not isinstance(adapter, Meshes) or adapter.layout(new) == adapter.layout(old)


def _find_shared(source: End, transfers: Iterable[Transfer]) -> dict[str, str]:
    """Returns the arrays of the target that are one of the source as it is.

    Raises:
        SyncError: An array of the source can be written to, which would change both.
    """
    by_target: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        by_target.setdefault(transfer.target.name, []).append(transfer)
    shared: dict[str, str] = {}
    for name, group in by_target.items():
        parts = [t.source for t in group if t.source is not None and not t.piece.steps]
        (first, *others) = {part.name for part in parts} or [""]
        is_same = len(parts) == len(group) and all(t.froms == t.to for t in group)
        if others or not is_same or {part.box for part in parts} != {t.target.box for t in group}:
            continue
        if not owner_of(source.arrays[source.number(first)]).frozen:
            raise SyncError(
                f"{first}: share=True, but this array can be written to, which would change the "
                "running model at any time. Leave out share=True"
            )
        shared[name] = first
    return shared
