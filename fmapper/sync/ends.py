"""The two ends of a sync: which arrays a model has, and which parts of them are here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fmapper.backends.discovery import owner_of
from fmapper.checkpoints.boxes import Box
from fmapper.errors import SyncError
from fmapper.sync.memory import parts_of
from fmapper.sync.reader import Reader


@dataclass(frozen=True, slots=True)
class Outline:
    """An array of a model, as all processes know it.

    Attributes:
        shape: Its shape.
        dtype: Its dtype, by name.
        tied_to: The first name of the same array; empty if that is this one.
        needed: The other end must have it.
        free: It may stay as it is: a counter, a random state.
        boxes: The parts that each process has, by its rank.
    """

    shape: tuple[int, ...]
    dtype: str
    tied_to: str = ""
    needed: bool = True
    free: bool = False
    boxes: Mapping[int, tuple[Box, ...]] = ()  # type: ignore[assignment]


class End:
    """A model, or a state, at one end of a sync.

    Attributes:
        tree: The model.
        outlines: Its arrays by name.
        keep: Patterns for names of arrays that may stay as they are.
        entries: Those arrays, with all that is known of them.
        arrays: The arrays that are held, each once; a generator holds weights in another layout.
        held: Their outlines by name, with the parts that are in this process.
        layout: The rules that make them of those by name.
    """

    def __init__(self, tree: Any, role: str, rank: int, keep: Sequence[str] = ()) -> None:
        from fmapper.checkpoints.rules.rules import Rules
        from fmapper.generation.generator import Generator
        from fmapper.twins.one_sided import is_counter, is_kept, is_needed
        from fmapper.twins.sides import read_side

        if isinstance(tree, str | os.PathLike):
            raise SyncError(
                f"the {role} is the path of a checkpoint, which does not change: put it into a "
                "model with fmapper.load(path, like=model) or fmapper.transfer(path, model)"
            )
        if isinstance(tree, Generator) and role == "source" and tree.layout().rules:
            raise SyncError(
                "the source is a generator that keeps weights in blocks, for a batch of several "
                "rows. Pass the model, or fmapper.state(generator)"
            )
        side = read_side(tree, role)
        self.entries, self.keep = side.entries, keep
        self.tree = tree
        self.layout = tree.layout() if isinstance(tree, Generator) else Rules()
        self._generator = tree if isinstance(tree, Generator) else None
        self._reader = Reader(tree if self._generator is None else self._generator.live_arrays())
        self.arrays = self._reader.first
        numbers = {id(array): number for number, array in enumerate(self.arrays)}
        self._numbers: dict[str, int] = {}
        self.outlines: dict[str, Outline] = {}
        if self._generator is not None:
            self._numbers = {
                n: numbers[id(array)] for n, array in self._generator.live_arrays().items()
            }
        for name, entry in side.entries.items():
            number = numbers.get(id(entry.value))
            if self._generator is None and not entry.random:
                if number is None:
                    raise SyncError(
                        f"{name}: this array of the {role} is computed when it is asked for, so "
                        "that it cannot be kept in step. Pass fmapper.state of the model"
                    )
                self._numbers[name] = number
            needed, free = is_needed(entry), entry.random or is_counter(entry) or entry.transient
            free = free or is_kept(entry, keep)
            tied = entry.tied_to
            self.outlines[name] = Outline(entry.shape, entry.dtype, tied, needed, free)
        self.held = self._find_held(rank)

    def _find_held(self, rank: int) -> dict[str, Outline]:
        """Returns the arrays that are held, each once, with the boxes that are here."""
        found: dict[str, Outline] = {}
        seen: set[int] = set()
        for name, number in self._numbers.items():
            if number in seen:
                continue
            seen.add(number)
            array = self.arrays[number]
            adapter = owner_of(array)
            boxes = {rank: (*parts_of(array),)}
            found[name] = Outline(tuple(adapter.shape(array)), adapter.dtype(array), boxes=boxes)
        return found

    def forget(self) -> None:
        """Lets go of the arrays that were there when the sync was planned."""
        self.entries, self.arrays = {}, []
        self._reader.forget()

    def read(self, tree: Any = None) -> list[Any]:
        """Returns the arrays now, of the tree or of another one of its structure."""
        if self._generator is not None:
            return self._reader.read(self._generator.live_arrays())
        return self._reader.read(self.tree if tree is None else tree)

    def number(self, name: str) -> int:
        """Returns the number of a held array."""
        return self._numbers[name]

    def write(self, new: Mapping[int, Any]) -> Any:
        """Puts new arrays into the tree, by their numbers; returns the tree."""
        if self._generator is not None:
            held = self._generator.live_arrays()
            if new:
                self._generator.hold({n: new.get(k, held[n]) for n, k in self._numbers.items()})
        else:
            self.tree = self._reader.write(self.tree, new)
        return self.tree


def with_boxes(outlines: Mapping[str, Outline], more: Mapping[str, Outline]) -> dict[str, Outline]:
    """Returns outlines with the boxes that another process has of the same arrays."""
    found = dict(outlines)
    for name, outline in more.items():
        own = found.get(name)
        if own is not None and (own.shape, own.dtype) != (outline.shape, outline.dtype):
            raise SyncError(
                f"{name} is {own.dtype}{list(own.shape)} in one process and "
                f"{outline.dtype}{list(outline.shape)} in another"
            )
        found[name] = replace(outline, boxes={**(own.boxes if own else {}), **outline.boxes})
    return found
