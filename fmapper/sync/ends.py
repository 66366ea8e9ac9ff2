"""The two ends of a sync: which arrays a model has, and which parts of them are here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from operator import eq
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.arrays import Arrays, Device
from fmapper.backends.compute import Compute
from fmapper.backends.discovery import adapter_of, owner_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints.boxes import Box
from fmapper.errors import SyncError
from fmapper.files.dtypes import numpy_dtype
from fmapper.moves.view_ties import ties_of
from fmapper.sync.memory import Values, on_host, parts_of
from fmapper.sync.reader import Reader

if TYPE_CHECKING:
    from fmapper.sync.inputs import Input
    from fmapper.sync.transports import Transport


class Outline(NamedTuple):
    """An array of a model under its name, as all processes know it."""

    shape: tuple[int, ...]
    dtype: str
    tied_to: str = ""  # the first name of the same array; empty if that is this one
    needed: bool = True  # the other end must have it
    free: bool = False  # it may stay as it is: a counter, a random state
    random: bool = False  # it is a random state, which stays


class Held(NamedTuple):
    """An array as it is held in memory; a generator holds weights in another layout."""

    shape: tuple[int, ...]
    dtype: str
    boxes: dict[int, tuple[Box, ...]]  # the parts that each process has, by its rank
    domain: str = ""  # what arrays have in common that one computation can take; empty for none


class Place(NamedTuple):
    """Where an array is, and how it lies there."""

    adapter: Arrays
    dtype: str
    shape: tuple[int, ...]
    device: Device
    layout: Any  # mesh and spec; None for an array on one device

    @classmethod
    def of(cls, array: Any) -> Place:
        """Returns the place of an array."""
        owner = owner_of(array)
        layout = owner.layout(array) if isinstance(owner, Meshes) else None
        return cls(owner, owner.dtype(array), (*owner.shape(array),), owner.device(array), layout)


class End:
    """A model, or a state, at one end of a sync; `keep` has names of arrays that may stay."""

    def __init__(
        self, tree: Any, role: str, transport: Transport | None, keep: Sequence[str] = ()
    ) -> None:
        from fmapper.checkpoints.rules.rules import Rules
        from fmapper.generation.generator import Generator
        from fmapper.twins.one_sided import is_counter, is_kept
        from fmapper.twins.sides import read_side

        if isinstance(tree, str | os.PathLike):
            raise SyncError(
                f"the {role} is the path of a checkpoint, which does not change: put it into a "
                "model with fmapper.load(path, like=model) or fmapper.transfer(path, model)"
            )
        self.tree, self._role, self.keep = tree, role, keep
        self.generator = tree if isinstance(tree, Generator) else None
        self.layout = Rules() if self.generator is None else self.generator.layout()
        if role == "source" and self.layout.rules:
            raise SyncError(
                "the source is a generator that keeps weights in blocks, for a batch of several "
                "rows. Pass the model, or fmapper.state(generator)"
            )
        self.entries = entries = read_side(tree, role).entries
        self.outlines: dict[str, Outline] = {}  # of the arrays of the model, by name
        for name, entry in entries.items():
            may_stay = entry.random or is_counter(entry) or entry.transient
            kinds = not may_stay, may_stay or is_kept(entry, keep), entry.random
            self.outlines[name] = Outline(entry.shape, entry.dtype, entry.tied_to, *kinds)
        values = {name: entry.value for name, entry in entries.items() if not entry.random}
        live = values if self.generator is None else self.generator.live_arrays()
        self._reader = Reader(tree if self.generator is None else live)
        self.arrays = self._reader.first  # those that are held, each once
        self.places = [*map(Place.of, self.arrays)]
        self._is_whole = all(place.layout is None for place in self.places)
        numbers = {id(array): number for number, array in enumerate(self.arrays)}
        shared = ties_of(self.arrays)
        self._same = same = {v: base for v, base in shared if self._are_same(v, base, self.arrays)}
        for name, array in live.items():
            if id(array) not in numbers:
                raise SyncError(
                    f"{name}: this array of the {role} is computed when it is asked for, so "
                    "that it cannot be kept in step. Pass fmapper.state of the model"
                )
        self.numbers = {name: same.get(n := numbers[id(x)], n) for name, x in live.items()}
        first = {number: name for name, number in reversed(self.numbers.items())}
        for name, outline in self.outlines.items():
            tied_to = first.get(self.numbers.get(name, -1), name)
            if tied_to != name and not outline.tied_to and self.generator is None:
                self.outlines[name] = outline._replace(tied_to=tied_to)
        held = ((name, self.arrays[n], self.places[n]) for n, name in first.items())
        self.held = {name: _hold(array, place, transport) for name, array, place in held}
        self._exported: list[int] = []  # the numbers of arrays that have these parts
        self._values: list[Values] = []
        self._watched: list[tuple[Arrays, list[str], list[int], list[type], list[Any]]] = []

    def watch(self, names: Iterable[str]) -> None:
        """Lets each `read` check these arrays."""
        groups: dict[Arrays, list[str]] = {}
        for name in dict.fromkeys(names):
            groups.setdefault(self.places[self.numbers[name]].adapter, []).append(name)
        for adapter, watched in groups.items():
            arrays = [self.arrays[self.numbers[name]] for name in watched]
            alike = [*map(type, arrays)], [*adapter.places(arrays)]
            self._watched.append((adapter, watched, [self.numbers[n] for n in watched], *alike))

    def supply(self, inputs: Iterable[Input]) -> list[Values]:
        """Gives inputs the parts that are in this process; each `read` renews their values."""
        values: dict[str, dict[Box, Values]] = {}
        for leaf in inputs:
            if leaf.name in self.held and leaf.name not in values:
                _, dtype, boxes, _ = self.held[leaf.name]
                made = [Values(box, numpy_dtype(dtype)) for box in itertools.chain(*boxes.values())]
                values[leaf.name] = dict(zip(*boxes.values(), made, strict=True))
                self._exported.append(self.numbers[leaf.name])
                self._values += made
            for box, part in values.get(leaf.name, {}).items():
                leaf.supply(box, part)
        return self._values

    def forget(self) -> None:
        """Drops the references to the arrays of the planning."""
        self.entries, self.arrays = {}, []
        self._reader.first = []

    def read(self, tree: Any = None) -> list[Any]:
        """Returns the current arrays of the tree, or of another tree of the same structure.

        It raises a `SyncError` if one of those to watch is not as it was when it was planned.
        """
        if self.generator is not None:
            tree = self.generator.live_arrays()
        arrays = self._reader.read(self.tree if tree is None else tree)
        for view, base in self._same.items():
            if not self._are_same(view, base, arrays):
                name = next(name for name, number in self.numbers.items() if number == base)
                raise SyncError(
                    f"{name} of the {self._role} had the memory of another array when the sync was "
                    "planned, and has one of its own now. Create another Sync"
                )
        for adapter, names, numbers, types, places in self._watched:
            now = [arrays[number] for number in numbers]
            are_alike = [*map(type, now)] == types and all(map(eq, adapter.places(now), places))
            if are_alike and (self._role == "target" or adapter.unusable(now) is None):
                continue
            for name, number in zip(names, numbers, strict=True):
                problem = self._problem(arrays[number], self.places[number])
                if problem:
                    raise SyncError(
                        f"{name} of the {self._role} is not as it was when the sync was planned: "
                        f"{problem}. Create another Sync"
                    )
        hosts = on_host(self.parts(self._exported, arrays))
        for values, host in zip(self._values, hosts, strict=True):
            values.array = host
        return arrays

    def _are_same(self, view: int, base: int, arrays: Sequence[Any]) -> bool:
        """Returns whether two arrays are one, as those of tied weights in a state dict are."""
        memory = self.places[base].adapter.memory
        is_same = memory(arrays[view]) == memory(arrays[base])
        return is_same and self.places[view] == self.places[base]

    def _problem(self, array: Any, planned: Place) -> str:
        if adapter_of(array) is not planned.adapter:
            return f"it is a {type(array).__name__} now"
        if self._role == "source" and planned.adapter.unusable([array]) is not None:
            return "its values are gone, probably donated to a computation"
        place = Place.of(array)
        if place == planned:
            return ""
        return f"it is {place.dtype}{[*place.shape]} on {place.device} now"

    def parts(self, numbers: Iterable[int], arrays: Sequence[Any]) -> list[Any]:
        """Returns the parts of arrays in this process, in order, given the current arrays."""
        if self._is_whole:
            return [arrays[number] for number in numbers]
        where = ((arrays[number], self.places[number].layout) for number in numbers)
        return [y for x, lie in where for y in ((x,) if lie is None else parts_of(x).values())]

    def write(self, new: Mapping[int, Any]) -> Any:
        """Puts new arrays into the tree, by their numbers; returns the tree."""
        if self.generator is not None:
            held = self.generator.live_arrays()
            if new:
                self.generator.hold({n: new.get(k, held[n]) for n, k in self.numbers.items()})
        else:
            self.tree = self._reader.write(self.tree, new)
        return self.tree


def _hold(array: Any, place: Place, transport: Transport | None) -> Held:
    adapter, rank = place.adapter, 0 if transport is None else transport.rank
    domain = adapter.domain(array) if isinstance(adapter, Compute) else ""
    if not isinstance(adapter, Meshes) or adapter.writers(array) is None:
        domain = domain and f"{rank}: {domain}"
    elif transport is None or transport.framework != adapter.name:
        domain = ""  # its devices may be others of the same number
    return Held(place.shape, place.dtype, {rank: (*parts_of(array),)}, domain)
