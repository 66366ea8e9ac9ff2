"""Groups of parameters whose names differ in numbers alone: those of equal layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import TypeAlias

from fmapper.twins.sides import Entry
from fmapper.twins.words import Words, words_of

Index: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, ...]

_NUMBER = re.compile(r"\d+(?![A-Za-z\d])")
_LETTERS = "ijklmnop"


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters with one name but for its numbers, in the order of these."""

    pieces: tuple[str, ...]  # the texts of the name around its numbers
    members: Mapping[Index, Entry]

    @property
    def slots(self) -> int:
        """The number of numbers in the name."""
        return len(self.pieces) - 1

    @cached_property
    def pattern(self) -> str:
        """The name with braces for numbers."""
        return "{}".join(self.pieces)

    @cached_property
    def words(self) -> Words:
        """The words of the name, and of its layer if that is a norm or an embedding."""
        leaf, path = words_of(self.pattern, len(self.shapes[0]))
        return Words(leaf, path | (words_of(self.entries[0].layer).path & {"norm", "embed"}))

    @cached_property
    def parent(self) -> str:
        """The name without its last part."""
        return self.pattern.rpartition(".")[0]

    @cached_property
    def name(self) -> str:
        """The name with letters for numbers, to be shown."""
        if len(self.members) == 1:
            return self.entries[0].name
        letters = [f"{{{letter}}}" for letter in _LETTERS[: self.slots]]
        return "".join(map("".join, zip(self.pieces, [*letters, ""], strict=True)))

    @cached_property
    def entries(self) -> list[Entry]:
        """The parameters in order."""
        return [*self.members.values()]

    @cached_property
    def shapes(self) -> list[Shape]:
        """The shapes in order."""
        return [entry.shape for entry in self.entries]

    def split(self, slot: int) -> Iterator[Group]:
        """Yields a group for each number that the name has at a place."""
        parts: dict[int, dict[Index, Entry]] = {}
        for index, entry in self.members.items():
            parts.setdefault(index[slot], {})[(*index[:slot], *index[slot + 1 :])] = entry
        for number, members in parts.items():
            joined = f"{self.pieces[slot]}{number}{self.pieces[slot + 1]}"
            yield Group((*self.pieces[:slot], joined, *self.pieces[slot + 2 :]), members)

    @cached_property
    def keys(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The sizes that this has as it is, or stacked over one number or two, and over which."""
        choices = (over for n in range(3) for over in combinations(range(self.slots), n))
        rests = ((self.without(over), over) for over in choices)
        return [
            (tuple(sum(math.prod(e.shape) for e in part) for part in rest.values()), over)
            for rest, over in rests
            if rest is not None
        ]

    def without(self, slots: tuple[int, ...]) -> dict[Index, list[Entry]] | None:
        """Returns the parameters by their other numbers; None if these are not a full block."""
        rest: dict[Index, list[Entry]] = {}
        numbers: dict[Index, list[Index]] = {}
        for index, entry in self.members.items():
            key = tuple(n for at, n in enumerate(index) if at not in slots)
            rest.setdefault(key, []).append(entry)
            numbers.setdefault(key, []).append(tuple(index[at] for at in slots))
        first, *others = numbers.values()
        block = [*product(*(range(min(c), max(c) + 1) for c in zip(*first, strict=True)))]
        if first != block or any(other != first for other in others):
            return None
        return rest


def groups_of(entries: Iterable[Entry]) -> list[Group]:
    """Groups parameters by their names, numbers of dimensions, and classes of layers."""
    groups: dict[tuple[object, ...], dict[Index, Entry]] = {}
    for entry in entries:
        pieces = tuple(_NUMBER.split(entry.name))
        index = tuple(map(int, _NUMBER.findall(entry.name)))
        key = (pieces, len(entry.shape), entry.layer)
        groups.setdefault(key, {})[index] = entry
    return [Group(key[0], dict(sorted(members.items()))) for key, members in groups.items()]  # type: ignore[arg-type]
