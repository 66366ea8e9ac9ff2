"""The two ends of a sync: which arrays a model has, and which parts of them are here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.arrays import Arrays, Device
from fmapper.backends.compute import Compute
from fmapper.backends.discovery import adapter_of, owner_of
from fmapper.backends.meshes import Meshes
from fmapper.checkpoints.boxes import Box, full_box
from fmapper.errors import SyncError
from fmapper.sync.memory import parts_of
from fmapper.sync.reader import Reader

if TYPE_CHECKING:
    from fmapper.sync.transports import Transport


class Outline(NamedTuple):
    """An array of a model under its name, as all processes know it."""

    shape: tuple[int, ...]
    dtype: str
    tied_to: str = ""  # the first name of the same array; empty if that is this one
    needed: bool = True  # the other end must have it
    free: bool = False  # it may stay as it is: a counter, a random state


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
    """A model, or a state, at one end of a sync.

    Attributes:
        tree: The model.
        outlines: Its arrays by name.
        keep: Patterns for names of arrays that may stay as they are.
        entries: Those arrays, with their properties.
        arrays: The arrays that are held, each once.
        numbers: Their numbers in these by name.
        places: Where they are.
        held: Their outlines by name, with the parts that are in this process.
        layout: The rules that make them of those by name.
    """

    def __init__(
        self, tree: Any, role: str, transport: Transport | None, keep: Sequence[str] = ()
    ) -> None:
        from fmapper.checkpoints.rules.rules import Rules
        from fmapper.generation.generator import Generator
        from fmapper.twins.one_sided import is_counter, is_kept, is_needed
        from fmapper.twins.sides import read_side

        if isinstance(tree, str | os.PathLike):
            raise SyncError(
                f"the {role} is the path of a checkpoint, which does not change: put it into a "
                "model with fmapper.load(path, like=model) or fmapper.transfer(path, model)"
            )
        self.tree, self._role, self.keep = tree, role, keep
        self._generator = tree if isinstance(tree, Generator) else None
        self.layout = Rules() if self._generator is None else self._generator.layout()
        if role == "source" and self.layout.rules:
            raise SyncError(
                "the source is a generator that keeps weights in blocks, for a batch of several "
                "rows. Pass the model, or fmapper.state(generator)"
            )
        self.entries = entries = read_side(tree, role).entries
        self.outlines: dict[str, Outline] = {}
        for name, entry in entries.items():
            free = entry.random or is_counter(entry) or entry.transient or is_kept(entry, keep)
            tied, needed = entry.tied_to, is_needed(entry)
            self.outlines[name] = Outline(entry.shape, entry.dtype, tied, needed, free)
        if self._generator is None:
            live = {name: entry.value for name, entry in entries.items() if not entry.random}
        else:
            live = self._generator.live_arrays()
        self._reader = Reader(tree if self._generator is None else live)
        self.arrays = self._reader.first
        self.places = [*map(Place.of, self.arrays)]
        self._wholes = [full_box(place.shape) for place in self.places]
        numbers = {id(array): number for number, array in enumerate(self.arrays)}
        for name, array in live.items():
            if id(array) not in numbers:
                raise SyncError(
                    f"{name}: this array of the {role} is computed when it is asked for, so "
                    "that it cannot be kept in step. Pass fmapper.state of the model"
                )
        self.numbers = {name: numbers[id(array)] for name, array in live.items()}
        first = {number: name for name, number in reversed(self.numbers.items())}
        held = ((name, self.arrays[n], self.places[n]) for n, name in first.items())
        self.held = {name: _hold(array, place, transport) for name, array, place in held}

    def forget(self) -> None:
        """Drops the references to the arrays of the planning."""
        self.entries, self.arrays = {}, []
        self._reader.first = []

    def read(self, names: Iterable[str], tree: Any = None) -> list[Any]:
        """Returns the current arrays of the tree, or of another tree of the same structure.

        Raises:
            SyncError: One of these names is not as it was when the sync was planned.
        """
        if self._generator is not None:
            tree = self._generator.live_arrays()
        arrays = self._reader.read(self.tree if tree is None else tree)
        for name in names:
            problem = self._problem(arrays[self.numbers[name]], self.places[self.numbers[name]])
            if problem:
                raise SyncError(
                    f"{name} of the {self._role} is not as it was when the sync was planned: "
                    f"{problem}. Create another Sync"
                )
        return arrays

    def _problem(self, array: Any, planned: Place) -> str:
        if adapter_of(array) is not planned.adapter:
            return f"it is a {type(array).__name__} now"
        if self._role == "source" and planned.adapter.unusable([array]) is not None:
            return "its values are gone, probably donated to a computation"
        place = Place.of(array)
        if place == planned:
            return ""
        return f"it is {place.dtype}{[*place.shape]} on {place.device} now"

    def parts(self, name: str, arrays: Sequence[Any]) -> Mapping[Box, Any]:
        """Returns the parts of an array in this process, given the current arrays."""
        number = self.numbers[name]
        if self.places[number].layout is None:
            return {self._wholes[number]: arrays[number]}
        return parts_of(arrays[number])

    def write(self, new: Mapping[int, Any]) -> Any:
        """Puts new arrays into the tree, by their numbers; returns the tree."""
        if self._generator is not None:
            held = self._generator.live_arrays()
            if new:
                self._generator.hold({n: new.get(k, held[n]) for n, k in self.numbers.items()})
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
