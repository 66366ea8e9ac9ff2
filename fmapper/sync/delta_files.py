"""`save_delta` and `apply_delta`: what has changed between two states, in a safetensors file.

Each changed array has its code there under its name, as uint8. The metadata has, under
`fmapper.delta`, a table of all arrays with dtype, shape, and digests of the bits before and after.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload

from fmapper.checkpoints.boxes import Box, box_shape, box_slices, flat_range, full_box
from fmapper.checkpoints.checkpoint import Checkpoint
from fmapper.checkpoints.extras.values import find_clashes, values_in, with_values
from fmapper.checkpoints.formats.format import (
    Contents,
    check_contents,
    merge_ties,
    read_contents,
)
from fmapper.checkpoints.formats.safetensors import Safetensors
from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.save import contents_of_tree, transient_names
from fmapper.checkpoints.stored import SourceFile, StoredArray
from fmapper.errors import CheckpointError, StructureMismatchError
from fmapper.files.bounded_json import read_json
from fmapper.files.untrusted import Misfit, show
from fmapper.files.urls import Url, place_of
from fmapper.files.whole import new_path
from fmapper.progress import step
from fmapper.states.state import load_state
from fmapper.sync.delta import (
    CHUNK,
    Layout,
    Row,
    chunks,
    hash_chunks,
    head,
    head_bytes,
    in_threads,
    ranges_of,
)
from fmapper.tracebacks import short_traceback
from fmapper.tree.nodes import sync

T = TypeVar("T")
_KEY = "fmapper.delta"
_SHORT = 12  # characters of a digest in an error


@short_traceback
def save_delta(path: str | os.PathLike[str], base: Any, new: Any) -> None:
    """Writes what makes of one state another one: the elements that differ, bit for bit.

    The file is of the safetensors format, and appears when it is complete. It takes some 1.5 % of
    the bytes where 1 % of the elements have changed in bfloat16. Arrays are compared a few MiB at a
    time, so that checkpoints may be larger than memory.

    Args:
        path: The file.
        base: The state that receivers have: a model, arrays by name (any tree of any framework),
            or a checkpoint in a file or folder, by its path.
        new: The state that they are to have, with the same names, shapes and dtypes. Its numbers
            and texts go along, for receivers that have a place for them.

    Raises:
        StructureMismatchError: Names, shapes or dtypes differ; lists them all.
        CheckpointError: A checkpoint is damaged, or several processes hold parts of an array.

    Examples:
        >>> import fmapper, numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/delta.safetensors"
        >>> save_delta(path, {"w": np.zeros(3)}, {"w": np.array([0.0, 2.5, 0.0])})
        >>> apply_delta({"w": np.zeros(3)}, path)["w"]
        array([0. , 2.5, 0. ])
    """
    target = _local(path)
    with step(f"saving {target.name}"), new_path(target) as beside:
        old, now = _Side.of(base), _Side.of(new)
        names = _common_names(old, now)
        spool = beside.with_name(f"{beside.name}.codes")  # which goes along with the other
        with spool.open("xb") as file:
            codes = {n: _compare(file, old.arrays[n], now.arrays[n]) for n in names}
        table = {n: (*_form(now.arrays[n]), *codes[n].digests) for n in names}
        stored: dict[Any, str] = {}  # what several names have in common is stored once
        first_of = {n: stored.setdefault(row, n) for n, row in table.items() if codes[n].values}
        about = {
            "version": 1,
            "base": _total(_rows(table, 2)),
            "result": _total(_rows(table, 3)),
            "values": sum(codes[name].values for name in stored.values()),
            "arrays": table,
        }
        source = SourceFile(spool)
        contents = Contents(
            {
                name: StoredArray(source, codes[name].start, (codes[name].nbytes,), "uint8")
                for name in first_of.values()
            },
            {name: first for name, first in first_of.items() if name != first},
            now.contents.values,
            {_KEY: json.dumps(about)},
            objects=now.contents.objects,
        )
        check_contents(contents)
        Safetensors().write(Writer(beside), contents)


@overload
def apply_delta(base: Any, *paths: str | os.PathLike[str], out: str | os.PathLike[str]) -> None: ...
@overload
def apply_delta(base: T, *paths: str | os.PathLike[str], out: None = None) -> T: ...
@short_traceback
def apply_delta(
    base: Any,
    *paths: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
) -> Any:
    """Returns the state that `save_delta` was given as `new`, or writes it to a file.

    Before anything is made, the base is compared with the digest in the delta, and each further
    delta with the one before it. The result is compared when it is there.

    Args:
        base: The state that the first delta was made from: a model or any other tree, of any
            framework, which does not change; or a checkpoint, by its path, whose metadata stay.
        paths: The deltas, each of which begins where the one before it ends.
        out: The safetensors file to write, a few MiB at a time; it may be the base. Needed for a
            checkpoint.

    Returns:
        A new tree like the base, as `load_state` gives; None with `out`.

    Raises:
        CheckpointError: The base is another one, the deltas do not follow one another, a file is
            damaged or not a delta, or the result is not what it was when the delta was made.
        TypeError: There is no delta, or a checkpoint has no `out`.
    """
    if not paths:
        raise TypeError("apply_delta: pass the path of at least one delta after the base")
    is_stored = isinstance(base, str | os.PathLike | Checkpoint)
    if is_stored and out is None:
        raise TypeError("apply_delta: pass out=, the file to write, for a checkpoint")
    with step("applying deltas"):
        deltas = [_Delta.read(path) for path in paths]
        for one, other in itertools.pairwise(deltas):
            _check_same(f"{other.path} does not follow {one.path}", other.base, one.result)
        side, last = _Side.of(base), deltas[-1]
        _check_same(f"{deltas[0].path} is of another base", deltas[0].base, side.table(deltas[0]))
        named = _patch_all(side, deltas)
        values = last.contents.values
        for clash in find_clashes(values, values_in(base), named) if out is None else ():
            raise CheckpointError(f"{last.path}: {clash.replace('checkpoint', 'delta')}")
        wrong = f"{last.path}: the result is not what it was when the delta was made"
        if out is None:
            filled = load_state(base, named)
            filled = with_values(filled, values) if values_in(filled).keys() & values else filled
            _check_same(wrong, last.result, _Side.of(filled).table(last))
            return filled
        contents = Contents(
            *merge_ties(named),
            {**side.contents.values, **values},
            side.contents.metadata,
            objects=side.contents.objects | last.contents.objects,
        )
        check_contents(contents)
        with new_path(_local(out)) as beside:
            Safetensors().write(Writer(beside), contents)
            _check_same(wrong, last.result, _Side(Safetensors().read(beside)).table(last))
    return None


def _local(path: str | os.PathLike[str]) -> Path:
    place = place_of(path)
    if isinstance(place, Url):
        raise CheckpointError(f"{place}: deltas are written to local files; copy it from there")
    return place


# --- states, and what identifies them -------------------------------------------------------------


class _Outline(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    digest: str


class _Side:
    """A state to compare: its arrays by name, a tied one under each of its names.

    Attributes:
        optional: Names of buffers that checkpoints leave out.
    """

    def __init__(self, contents: Contents, optional: Iterable[str] = ()) -> None:
        tied = {name: contents.arrays[first] for name, first in contents.ties.items()}
        self.contents, self.arrays = contents, {**contents.arrays, **tied}
        self.optional = frozenset(optional)

    @classmethod
    def of(cls, source: Any) -> _Side:
        """Reads the names of a tree, or of a checkpoint by its path."""
        if isinstance(source, str | os.PathLike):
            return cls(read_contents(place_of(source))[1])
        from fmapper.checkpoints.formats.together import spread_arrays  # as `save` imports it

        sync()
        contents = contents_of_tree(source)
        if spread := spread_arrays(contents):
            raise CheckpointError(
                f"{min(spread)}: several processes hold parts of it. Save the model with "
                "fmapper.save, and pass the path."
            )
        return cls(contents, transient_names(source))

    def table(self, delta: _Delta) -> dict[str, _Outline]:
        """Returns what identifies the arrays of which a delta is, and others that it lacks."""
        named = {n: a for n, a in self.arrays.items() if n in delta.base or n not in self.optional}
        digests = {at: _digest(a) for at, a in {id(a): a for a in named.values()}.items()}
        return {name: _Outline(*_form(a), digests[id(a)]) for name, a in named.items()}


def _digest(array: LazyArray) -> str:
    bits, whole = _bits(array), hashlib.sha256()
    ranges = ranges_of(bits.size, bits.dtype.itemsize)
    for hashes in in_threads(lambda ends: hash_chunks(bits.read((ends,))), ranges, bits.nbytes):
        whole.update(hashes)
    return _short(whole)


def _form(array: LazyArray) -> tuple[str, tuple[int, ...]]:
    return array.dtype.name, array.shape


def _short(digest: Any) -> str:
    found: str = digest.hexdigest()[:32]
    return found


def _rows(table: Mapping[str, Any], digest: int) -> dict[str, _Outline]:
    return {n: _Outline(row[0], tuple(row[1]), row[digest]) for n, row in table.items()}


def _total(outlines: Mapping[str, _Outline]) -> str:
    """Returns the digest of a state: of its names, shapes, dtypes and bits."""
    return hashlib.sha256(json.dumps(sorted(outlines.items())).encode()).hexdigest()


def _check_same(
    problem: str, wanted: Mapping[str, _Outline], found: Mapping[str, _Outline]
) -> None:
    """Raises unless two states are the same, and names the first array that differs."""
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        here, there = wanted.get(name), found.get(name)
        if here == there:
            continue
        what = "is missing" if there is None else "is left over" if here is None else ""
        if here and there:
            forms = (show(f"{one.dtype}{[*one.shape]}") for one in (there, here))
            what = "has other values" if here[:2] == there[:2] else "is {}, not {}".format(*forms)
        raise CheckpointError(
            f"{problem}: the digest is {_total(found)[:_SHORT]}, and {_total(wanted)[:_SHORT]} was "
            f"expected; {show(name)} {what}"
        )


def _common_names(old: _Side, now: _Side) -> list[str]:
    """Returns the names of both sides.

    Raises:
        StructureMismatchError: They differ, or shapes or dtypes do.
    """
    problems = [f"{n}: only in the base" for n in old.arrays.keys() - now.arrays - old.optional]
    problems += [f"{n}: only in the new" for n in now.arrays.keys() - old.arrays - now.optional]
    names = [name for name in now.arrays if name in old.arrays]
    for name in names:
        (a, shape), (b, other) = _form(old.arrays[name]), _form(now.arrays[name])
        if (a, shape) != (b, other):
            problems.append(f"{name}: {a}{[*shape]} in the base, {b}{[*other]} in the new")
    if problems:
        raise StructureMismatchError(
            "a delta is of arrays of the same names, shapes and dtypes:\n"
            + "\n".join(f"  {line}" for line in sorted(problems))
        )
    return names


# --- codes ----------------------------------------------------------------------------------------


def _bits(array: LazyArray) -> LazyArray:
    """Returns the bits of an array as one dimension of unsigned integers."""
    itemsize = min(array.dtype.itemsize, 8)
    return array.reshape((array.size,)).view(f"uint{8 * itemsize}")


class _Code(NamedTuple):
    """The code of an array in a file, and the digests of the array before and after."""

    start: int
    nbytes: int
    values: int
    digests: tuple[str, str]


def _compare(file: BinaryIO, old: LazyArray, now: LazyArray) -> _Code:
    """Writes the code of an array, a part at a time; nothing if nothing has changed."""
    before, after = _bits(old), _bits(now)
    start = file.tell()
    file.seek(start + head_bytes(before.size, before.dtype.itemsize))
    digests = hashlib.sha256(), hashlib.sha256()
    rows: list[Row] = []

    def compare(ends: tuple[int, int]) -> tuple[list[bytes], list[Any]]:
        x, y = (bits.read((ends,)) for bits in (before, after))
        hashes, found = hash_chunks(x), list(chunks(x, y))
        return [hashes, hash_chunks(y) if any(row.values for row, _ in found) else hashes], found

    ranges = ranges_of(before.size, before.dtype.itemsize)
    for hashes, found in in_threads(compare, ranges, before.nbytes):
        for digest, more in zip(digests, hashes, strict=True):
            digest.update(more)
        for row, pieces in found:
            rows.append(row)
            file.writelines(memoryview(piece.view("u1").data) for piece in pieces)
    stop, values = file.tell(), sum(row.values for row in rows)
    file.seek(start)
    if values:
        file.write(head(before.size, before.dtype.itemsize, rows).data)
        file.seek(stop)
    return _Code(start, stop - start, values, (_short(digests[0]), _short(digests[1])))


class _Patched(LazyArray):
    """An array with codes applied to its bits, one after the other, when it is read.

    All codes are read and checked when it is made.
    """

    def __init__(self, array: LazyArray, codes: list[LazyArray]) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self._bits = _bits(array)
        begin = head_bytes(self._bits.size, self._bits.dtype.itemsize)
        self._codes = [
            (code, Layout.of(code.read(((0, min(begin, code.size)),)), code.size, self._bits))
            for code in codes
        ]
        for code, layout in self._codes:
            for at in range(len(layout)):
                layout.check(at, code.read((layout.ends(at),)))

    def _read(self, box: Box) -> Any:
        import numpy as np

        found = flat_range(box, self.shape)
        if found is None:  # its elements are not contiguous
            rows = (box[0], *full_box(self.shape[1:]))
            return self._read(rows)[(slice(None), *box_slices(box[1:]))]
        most = CHUNK // self._bits.dtype.itemsize
        low, high = (place * self.dtype.itemsize // self._bits.dtype.itemsize for place in found)
        numbers = range(low // most, -(-high // most))
        begin, end = numbers.start * most, min(numbers.stop * most, self._bits.size)
        out = self._bits.read(((begin, end),), np.empty(end - begin, self._bits.dtype))
        for code, layout in self._codes:
            for at in numbers:
                place = layout.place(at)
                chunk = code.read((layout.ends(at),))
                layout.patch(at, chunk, out[place.start - begin : place.stop - begin])
        return out[low - begin : high - begin].view(self.dtype).reshape(box_shape(box))


def _patch_all(side: _Side, deltas: list[_Delta]) -> dict[str, LazyArray]:
    """Returns the arrays after all deltas; those of one base and one code are one object."""
    made: dict[tuple[int, ...], LazyArray] = {}
    named: dict[str, LazyArray] = {}
    for name in deltas[0].base:
        array = side.arrays[name]
        codes = [delta.codes[name] for delta in deltas if name in delta.codes]
        key = (id(array), *map(id, codes))
        try:
            if key not in made:
                made[key] = _Patched(array, codes) if codes else array
        except CheckpointError as error:
            raise CheckpointError(f"{show(name)}: {error}") from None
        named[name] = made[key]
    return named


# --- files of deltas ------------------------------------------------------------------------------


class _Delta(NamedTuple):
    """A delta in a file: what identifies its base and its result, and the codes between them."""

    path: Any
    contents: Contents
    base: dict[str, _Outline]
    result: dict[str, _Outline]
    codes: dict[str, LazyArray]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> _Delta:
        """Reads all but the codes.

        Raises:
            CheckpointError: The file is damaged, or not a delta.
        """
        place = place_of(path)
        contents = read_contents(place, Safetensors.name)[1]
        codes = _Side(contents).arrays
        try:
            if _KEY not in contents.metadata:
                raise Misfit("is not a delta, which save_delta writes")
            about = read_json(contents.metadata[_KEY])
            if type(about) is not dict or about.get("version") != 1:
                raise Misfit("is a delta of another version of fmapper")
            table = about.get("arrays")
            if type(table) is not dict or not all(map(_is_row, table.values())):
                raise Misfit("is damaged: it lacks the table of its arrays")
            base, result = _rows(table, 2), _rows(table, 3)
            if (about.get("base"), about.get("result")) != (_total(base), _total(result)):
                raise Misfit("is damaged: its digests do not fit its table")
            if codes.keys() != {name for name in base if base[name] != result[name]}:
                raise Misfit("is damaged: it lacks the codes of arrays, or has too many")
            for name, code in codes.items():
                if (code.dtype.name, code.ndim) != ("uint8", 1):
                    raise Misfit(f"is damaged: {show(name)} is not a code")
        except Misfit as error:
            raise CheckpointError(f"{place}: {error}") from None
        return cls(place, contents, base, result, codes)


def _is_row(row: Any) -> bool:
    """Returns whether a row of the table has dtype, shape and two digests."""
    return (
        type(row) is list
        and [type(item) for item in row] == [str, list, str, str]
        and all(type(size) is int and size >= 0 for size in row[1])
    )
