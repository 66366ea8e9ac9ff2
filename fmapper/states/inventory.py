"""The inventory of a tree: the data of a summary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fmapper.backends.discovery import adapter_of
from fmapper.backends.undeclared import holds_arrays
from fmapper.moves.view_ties import find_view_ties
from fmapper.transforms.trainable import Trained
from fmapper.tree.keypath import KeyPath, Link
from fmapper.tree.nodes import ATOM, CHILDLESS, WITHOUT_IDENTITY, NodeType, kind_of
from fmapper.tree.walk import walk

HIDES = "holds arrays but is not a functor"
FOLDED = 3  # this many like items of a list, or more, are shown as one
_PATHS = frozenset({"path", "same_as", "view_of"})
_VALUE = 40  # characters of a number or string


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One place of a tree.

    Attributes:
        path: Its path.
        cls: The name of the object's class.
        shape: The shape of an array; None for others, or if it has no shape yet.
        dtype: The dtype of an array.
        device: The device of an array.
        nbytes: Bytes of an array, or of all arrays below a node; memory is counted once, at its
            first place.
        trainable: Whether training changes an array; None for other objects.
        same_as: The first path of an object that also occurs earlier; its children are listed only
            there.
        view_of: The path of the array whose memory this one shares.
        note: The value of a number or string; the problem of an array, or of an undeclared object
            that holds arrays.
    """

    path: KeyPath
    cls: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    nbytes: int = 0
    trainable: bool | None = None
    same_as: KeyPath | None = None
    view_of: KeyPath | None = None
    note: str = ""


class Total(NamedTuple):
    """The total of the arrays of one dtype on one device, each counted once."""

    arrays: int
    numbers: int
    nbytes: int


class Inventory:
    """The rows of a tree, with their hierarchy and repetitions.

    Attributes:
        rows: One for each place.
        below: For each row the rows of its children.
        keys: For each row the last key of its path.
    """

    def __init__(self, tree: Any) -> None:
        self.rows: list[SummaryRow] = []
        self.below: list[list[int]] = []
        self._trained = Trained(tree, strict=False)
        self.keys: list[Any] = []
        self._links: list[Link] = []
        self._first: dict[int, tuple[Any, int]] = {}
        self._same: dict[int, int] = {}  # row -> the first row of the same object
        self._arrays: dict[int, Any] = {}  # row -> the array whose first place it is
        self._drafts: list[dict[str, Any]] = []
        for _ in walk(tree, state=self._draft(None, None, None, tree), down=self._draft):
            pass
        self._finish(self._drafts, self._views())

    def _draft(self, parent: int | None, node: Any, key: Any, child: Any) -> int:
        """Adds a row for a place, without its children; returns the row of the first place."""
        at = len(self._drafts)
        link = None if parent is None else (self._links[parent], key)
        self.below.append([])
        self.keys.append(key)
        self._links.append(link)
        if parent is not None:
            self.below[parent].append(at)
        kind = kind_of(type(child))
        draft: dict[str, Any] = {"path": KeyPath.from_link(link), "cls": type(child).__name__}
        self._drafts.append(draft)
        is_array = adapter_of(child) is not None
        if is_array:
            draft |= self._array(child)
        elif kind is not CHILDLESS and not isinstance(kind, NodeType):
            draft["note"] = _note(child)
        if not _has_identity(child):
            return at
        _, first = self._first.setdefault(id(child), (child, at))
        if first != at:
            draft["same_as"], draft["nbytes"] = KeyPath.from_link(self._links[first]), 0
            self._same[at] = first
        elif is_array:
            self._arrays[at] = child
        return first

    def _array(self, array: Any) -> dict[str, Any]:
        adapter = adapter_of(array)
        assert adapter is not None
        facts: dict[str, Any] = {"dtype": adapter.dtype(array)}
        facts["trainable"] = array in self._trained
        try:
            facts["device"] = str(adapter.device(array))
            facts["nbytes"] = adapter.nbytes(array)
            shape = adapter.shape(array)
            if all(isinstance(n, int) for n in shape):
                facts["shape"] = shape
            else:
                facts["note"] = f"shape {shape}"
        except (RuntimeError, TypeError) as error:  # deleted, lazy, nested
            facts["note"] = str(error).partition(".")[0]
        return facts

    def _views(self) -> dict[int, int]:
        """Maps the rows of views to the rows of their bases."""
        by_backend: dict[str, list[int]] = {}
        for at, array in self._arrays.items():
            adapter = adapter_of(array)
            assert adapter is not None
            by_backend.setdefault(adapter.name, []).append(at)
        views = {}
        for ats in by_backend.values():
            arrays = [self._arrays[at] for at in ats]
            adapter = adapter_of(arrays[0])
            assert adapter is not None
            for tie in find_view_ties(arrays, adapter) if adapter.may_share_memory(arrays) else ():
                views[ats[tie.view]] = ats[tie.base]
        return views

    def _finish(self, drafts: list[dict[str, Any]], views: dict[int, int]) -> None:
        """Sums up bytes below nodes, and finds equal subtrees."""
        signatures: dict[Any, int] = {}
        self._signature = [0] * len(drafts)
        for at in range(len(drafts) - 1, -1, -1):
            draft = drafts[at]
            if at in views:
                draft["view_of"], draft["nbytes"] = drafts[views[at]]["path"], 0
            below = self.below[at]
            if below:
                draft["nbytes"] = sum(drafts[i].get("nbytes", 0) for i in below)
            fields = tuple(item for item in draft.items() if item[0] not in _PATHS)
            repeats = self._same.get(at), views.get(at)
            parts = tuple((self.keys[i], self._signature[i]) for i in below)
            self._signature[at] = signatures.setdefault((fields, repeats, parts), len(signatures))
        self.rows = [SummaryRow(**draft) for draft in drafts]

    def runs(self, at: int, *, fold: bool) -> Iterator[tuple[list[int], bool]]:
        """Groups the children of a row; like items of a list form one group."""
        below = self.below[at]
        runs: list[list[int]] = []
        start = 0
        while start < len(below):
            end = start + 1
            if fold and isinstance(self.keys[below[start]], int):
                signature = self._signature[below[start]]
                while end < len(below) and self._signature[below[end]] == signature:
                    end += 1
            if end - start < FOLDED:
                end = start + 1
            runs.append(below[start:end])
            start = end
        return iter([(run, n == len(runs) - 1) for n, run in enumerate(runs)])

    def totals(self) -> dict[tuple[str, str], Total]:
        """Sums up arrays, numbers and bytes by device and dtype; ties and views count once."""
        totals: dict[tuple[str, str], Total] = {}
        for at in self._arrays:
            row = self.rows[at]
            key = row.device or "nowhere", row.dtype or ""
            before = totals.get(key, Total(0, 0, 0))
            totals[key] = Total(
                before.arrays + 1,
                before.numbers + (0 if row.view_of is not None else _numbers(row)),
                before.nbytes + row.nbytes,
            )
        return totals

    def numbers_trained(self) -> int:
        """Counts the numbers in the trained arrays."""
        rows = (self.rows[at] for at in self._arrays)
        return sum(_numbers(row) for row in rows if row.trainable and row.view_of is None)


def _numbers(row: SummaryRow) -> int:
    return 0 if row.shape is None else math.prod(row.shape)


def _has_identity(x: Any) -> bool:
    kind = kind_of(type(x))
    constant = kind in WITHOUT_IDENTITY or kind is CHILDLESS
    return not constant and not (type(x) is tuple and not x)


def _note(leaf: Any) -> str:
    """Describes a leaf: the value of a number or string, or that it holds undeclared arrays."""
    if kind_of(type(leaf)) is ATOM:
        text = repr(leaf)
        return text if len(text) <= _VALUE else text[: _VALUE - 3] + "..."
    return HIDES if holds_arrays(leaf) else ""
