"""Lists the contents of a checkpoint from its headers, and compares two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fmapper.checkpoints.checkpoint import Checkpoint, read_checkpoint
from fmapper.checkpoints.formats.format import read_contents, without_collection
from fmapper.checkpoints.formats.writer import panels
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.save import contents_of_tree, transient_names
from fmapper.files.dtypes import name_of_dtype
from fmapper.files.urls import Place, place_of
from fmapper.progress import step
from fmapper.render import columns
from fmapper.tracebacks import short_traceback


@dataclass(frozen=True, slots=True)
class ArrayRow:
    """An array of a checkpoint: its name, shape, dtype, bytes, and the name it is tied to."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    tied_to: str | None = None


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint, as a table.

    Attributes:
        path: The file or folder.
        format: The name of its format.
        rows: Its arrays, in order.
        values: Its numbers and strings by name.
        metadata: Texts that are stored besides the arrays.
        files: The files that contain the arrays.
    """

    path: Place
    format: str
    rows: tuple[ArrayRow, ...]
    values: Mapping[str, Any]
    metadata: Mapping[str, str]
    files: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays; a tied one counts once."""
        return sum(row.nbytes for row in self.rows if row.tied_to is None)

    def __str__(self) -> str:
        """Returns a table of the arrays, and a line for the whole."""
        lines = [
            (row.name, row.dtype, str(list(row.shape)), f"{row.nbytes:,}", _tie(row))
            for row in self.rows
        ]
        files = f", {len(self.files)} files" if len(self.files) > 1 else ""
        count = sum(row.tied_to is None for row in self.rows)
        whole = f"{self.path}: {self.format}, {count} arrays, {self.nbytes:,} bytes{files}"
        values = [f"{name} = {value!r}" for name, value in self.values.items()]
        head = ("array", "dtype", "shape", "bytes", "")
        shown = columns([head, *lines]) if lines else ""
        return "\n".join(filter(None, (shown, *values, whole)))


def _tie(row: ArrayRow) -> str:
    return f"is {row.tied_to}" if row.tied_to else ""


@short_traceback
def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Lists the contents of a checkpoint; only headers are read.

    Raises:
        CheckpointError: It is damaged, or in no known format.
    """
    source = place_of(path)
    with step(f"inspecting {source.name}"):
        form, contents = read_contents(source)
    with without_collection():
        rows = [
            ArrayRow(name, array.shape, name_of_dtype(array.dtype), array.nbytes)
            for name, array in contents.arrays.items()
        ]
    for name, first in contents.ties.items():
        array = contents.arrays[first]
        rows.append(ArrayRow(name, array.shape, array.dtype.name, array.nbytes, first))
    return Inspection(
        source, form.name, tuple(rows), contents.values, contents.metadata, contents.files
    )


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """The difference of two arrays of one name.

    Attributes:
        name: Their name.
        what: `only in the first`, `only in the second`, `shape`, `dtype`, `value` or `values`.
        first: The shape, dtype or value in the first; for `values` the number of differing
            elements.
        second: The same in the second; for `values` the largest difference of two elements.
        relative: The largest difference, divided by the largest magnitude of the first.
    """

    name: str
    what: str
    first: Any = None
    second: Any = None
    relative: float | None = None

    def __str__(self) -> str:
        """Returns a line."""
        if self.what == "values":
            size = f"{self.first:,} elements differ, by up to {self.second:.3g}"
            return f"{self.name}: {size} ({self.relative:.2g} of the largest)"
        if self.first is None and self.second is None:
            return f"{self.name}: {self.what}"
        return f"{self.name}: {self.what} {self.first} and {self.second}"


@dataclass(frozen=True)
class Difference:
    """The differences between two checkpoints; false if there are none.

    Attributes:
        differences: One for each array, number or string that differs.
        compared: The number of entries in both.
    """

    differences: tuple[ArrayDifference, ...]
    compared: int

    def __bool__(self) -> bool:
        """Returns whether anything differs."""
        return bool(self.differences)

    def __str__(self) -> str:
        """Returns a line for each difference, and one for the whole."""
        lines = list(map(str, self.differences))
        plural = "s" if len(lines) > 1 else ""
        same = f"{len(lines)} difference{plural}" if lines else "nothing differs"
        return "\n".join([*lines, f"{self.compared} compared, {same}"])


@short_traceback
def diff(first: Any, second: Any, *, values: bool = True) -> Difference:
    """Compares two checkpoints: names, shapes, dtypes and values.

    Arrays of different dtypes are compared as float64. NaN equals NaN. Buffers of a model that are
    not persistent are compared only if the other side has them.

    Args:
        first: A file or folder, or any tree.
        second: The same.
        values: Whether to read the arrays; otherwise only headers are compared.

    Raises:
        CheckpointError: One of them is damaged, or in no known format.
    """
    with step("comparing checkpoints"):
        a, b = _by_name(first), _by_name(second)
        both, differences = [name for name in a if name in b], []
        for where, tree, names in (
            ("only in the first", first, [name for name in a if name not in b]),
            ("only in the second", second, [name for name in b if name not in a]),
        ):
            left_out = transient_names(tree) if names else ()
            differences += [ArrayDifference(name, where) for name in names if name not in left_out]
        for name in both:
            differences += _compare(name, a[name], b[name], values)
    return Difference(tuple(differences), len(both))


def _by_name(source: Any) -> Mapping[str, Any]:
    if isinstance(source, str | os.PathLike):
        return read_checkpoint(place_of(source))
    if isinstance(source, Checkpoint):
        return source
    contents = contents_of_tree(source)
    tied = {name: contents.arrays[first] for name, first in contents.ties.items()}
    return {**contents.arrays, **tied, **contents.values}


def _compare(name: str, a: Any, b: Any, values: bool) -> Iterator[ArrayDifference]:
    if not (isinstance(a, LazyArray) and isinstance(b, LazyArray)):
        if isinstance(a, LazyArray) or isinstance(b, LazyArray) or not _same_value(a, b):
            yield ArrayDifference(name, "value", _show(a), _show(b))
        return
    if a.shape != b.shape:
        yield ArrayDifference(name, "shape", list(a.shape), list(b.shape))
        return
    if a.dtype != b.dtype:
        yield ArrayDifference(name, "dtype", a.dtype.name, b.dtype.name)
    if values:
        yield from _compare_values(name, a, b)


def _same_value(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # NaN equals NaN, and 1 is not True


def _show(value: Any) -> str:
    return f"array{list(value.shape)}" if isinstance(value, LazyArray) else repr(value)


def _compare_values(name: str, a: LazyArray, b: LazyArray) -> Iterator[ArrayDifference]:
    import numpy as np

    count, most, largest = 0, 0.0, 0.0
    for box, _ in panels(a):
        x, y = a.read(box), b.read(box)
        if x.dtype == y.dtype and np.array_equal(_bits(x), _bits(y)):
            continue
        wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        x, y = x.astype(wide), y.astype(wide)
        with np.errstate(all="ignore"):
            differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
            count += int(differs.sum())
            distance = np.abs(x - y)[differs]
            distance[np.isnan(distance)] = np.inf
            most = max(most, float(distance.max(initial=0.0)))
            finite = np.abs(x[np.isfinite(x)])
            largest = max(largest, float(finite.max(initial=0.0)))
    if count:
        yield ArrayDifference(name, "values", count, most, most / largest if largest else np.inf)


def _bits(array: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
