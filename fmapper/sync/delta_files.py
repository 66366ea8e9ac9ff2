"""`save_delta` and `apply_delta`: what has changed between two states, in a safetensors file.

Each changed array has its code there under its name, as uint8. The metadata has, under
`fmapper.delta`, dtype and shape of all arrays, and their digests in the base and in the result.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, overload

from fmapper.checkpoints.boxes import Box, box_shape, box_slices, flat_range, full_box
from fmapper.checkpoints.checkpoint import Checkpoint, read_checkpoint
from fmapper.checkpoints.extras.values import find_clashes, values_in, with_values
from fmapper.checkpoints.formats.format import Contents, check_contents, merge_ties
from fmapper.checkpoints.formats.safetensors import Safetensors
from fmapper.checkpoints.formats.writer import Writer
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.save import contents_of_tree, transient_names
from fmapper.errors import CheckpointError, StructureMismatchError
from fmapper.files.bounded_json import read_json
from fmapper.files.untrusted import Misfit, show
from fmapper.files.urls import Url, place_of
from fmapper.files.whole import new_path
from fmapper.progress import step
from fmapper.states.state import load_state
from fmapper.sync.delta import Changes, bits_of, digest, encode
from fmapper.tracebacks import short_traceback
from fmapper.tree.nodes import sync

T = TypeVar("T")
_KEY = "fmapper.delta"
_DIGEST = re.compile("[0-9a-f]{32}")


@short_traceback
def save_delta(path: str | os.PathLike[str], base: Any, new: Any) -> None:
    """Writes the difference between two states: the elements that differ, bit for bit.

    The file is of the safetensors format, and appears when it is complete. It takes 2 % of the
    bytes where 1 % of the elements have changed in bfloat16. Arrays are compared a few MiB at a
    time, and only what has changed is held in memory.

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
    target = place_of(path)
    if isinstance(target, Url):
        raise CheckpointError(f"{target}: deltas are written to local files; copy it from there")
    with step(f"saving {target.name}"), new_path(target) as beside:
        old, now = _State(base), _State(new)
        a, b = old.arrays_for(now.arrays), now.arrays_for(old.arrays)
        if problems := [*_differences(_outlines(a, digests=False), _outlines(b, digests=False))]:
            text = "\n".join(f"  {line}" for line in sorted(problems))
            raise StructureMismatchError(f"the new state is not like the base:\n{text}")
        before, after = _outlines(a), _outlines(b)
        codes: dict[Any, LazyArray] = {}
        named: dict[str, LazyArray] = {}
        for name in a:
            pair = before[name], after[name]
            if pair[0] != pair[1]:
                if pair not in codes:
                    codes[pair] = encode(bits_of(a[name]), bits_of(b[name]))
                named[name] = codes[pair]
        table = {name: (*row, after[name].digest) for name, row in before.items()}
        text = json.dumps({"version": 1, "arrays": table})
        values, objects = now.contents.values, now.contents.objects
        contents = Contents(*merge_ties(named), values, {_KEY: text}, objects=objects)
        check_contents(contents)
        Safetensors().write(Writer(beside), contents)


@overload
def apply_delta(
    base: str | os.PathLike[str] | Checkpoint, *paths: str | os.PathLike[str]
) -> Checkpoint: ...
@overload
def apply_delta(base: T, *paths: str | os.PathLike[str]) -> T: ...
@short_traceback
def apply_delta(base: Any, *paths: str | os.PathLike[str]) -> Any:
    """Returns the state that `save_delta` was given as `new`.

    First the base is compared with the digests in the delta, each further delta with the one before
    it, and the result with its digests.

    Args:
        base: The state that the first delta was made from: a model or any other tree, of any
            framework, which does not change; or a checkpoint, or the path of one.
        paths: The deltas, each of which begins where the one before it ends.

    Returns:
        A new tree like the base, as `load_state` gives. Of a checkpoint a `Checkpoint` whose arrays
        are read when they are asked for: `fmapper.save(apply_delta(base, delta), new)` writes it, a
        few MiB at a time, also in the place of the base.

    Raises:
        CheckpointError: The base is another one, the deltas do not follow one another, a file is
            damaged or not a delta, or the result is not what it was when the delta was made.
        TypeError: There is no delta.
    """
    if not paths:
        raise TypeError("apply_delta: pass the path of at least one delta after the base")
    with step("applying deltas"):
        deltas = [_Delta.read(path) for path in paths]
        for delta, after in itertools.pairwise(deltas):
            _check_same(f"{after.path} does not follow {delta.path}", delta.result, after.base)
        state, first, last = _State(base), deltas[0], deltas[-1]
        given = _outlines(state.arrays_for(first.base))
        _check_same(f"{first.path} is of another base", first.base, given)
        named = _patch_all(state, deltas)
        wrong = f"{last.path}: the result is not what the delta was made of"
        _check_same(wrong, last.result, _outlines(named))
        tree, values = state.tree, last.contents.values
        if isinstance(tree, Checkpoint):
            values = {**state.contents.values, **values}
            objects = state.contents.objects | last.contents.objects
            ties = merge_ties(named)
            contents = Contents(*ties, values, state.contents.metadata, objects=objects)
            return Checkpoint.of(tree.path, tree.format, contents)
        for clash in find_clashes(values, values_in(tree), named):
            raise CheckpointError(f"{last.path}: {clash.replace('checkpoint', 'delta')}")
        filled = load_state(tree, named)
        return with_values(filled, values) if values_in(filled).keys() & values else filled


class _Outline(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    digest: str

    def __str__(self) -> str:
        return f"{self.dtype}{[*self.shape]}"


def _outlines(arrays: Mapping[str, LazyArray], *, digests: bool = True) -> dict[str, _Outline]:
    each = {id(array): array for array in arrays.values()}
    made = {
        key: _Outline(array.dtype.name, array.shape, digest(bits_of(array)) if digests else "")
        for key, array in each.items()
    }
    return {name: made[id(array)] for name, array in arrays.items()}


def _differences(wanted: Mapping[str, _Outline], given: Mapping[str, _Outline]) -> Iterator[str]:
    for name in [*wanted, *(name for name in given if name not in wanted)]:
        here, there = wanted.get(name), given.get(name)
        if here is None or there is None:
            yield f"{show(name)} is {'left over' if there else 'missing'}"
        elif here[:2] != there[:2]:
            yield f"{show(name)} is {show(str(there))}, not {show(str(here))}"
        elif here != there:
            yield f"{show(name)} has other values: {there.digest}, not {here.digest}"


def _check_same(text: str, wanted: Mapping[str, _Outline], given: Mapping[str, _Outline]) -> None:
    for difference in _differences(wanted, given):
        raise CheckpointError(f"{text}: {difference}")


class _State:
    """A state to compare: its arrays by name, a tied one under each of its names."""

    def __init__(self, source: Any) -> None:
        from fmapper.checkpoints.formats.together import spread_arrays  # as `save` imports it

        sync()
        is_path = isinstance(source, str | os.PathLike)
        self.tree = read_checkpoint(place_of(source)) if is_path else source
        self.contents = contents_of_tree(self.tree)
        if spread := spread_arrays(self.contents):
            raise CheckpointError(
                f"{min(spread)}: several processes hold parts of it. Save the model with "
                "fmapper.save, and pass the path."
            )
        self.arrays = _by_name(self.contents)
        self._optional = transient_names(self.tree)

    def arrays_for(self, names: Collection[str]) -> dict[str, LazyArray]:
        """Returns all arrays but the buffers that checkpoints leave out and are not named."""
        return {n: a for n, a in self.arrays.items() if n in names or n not in self._optional}


def _by_name(contents: Contents) -> dict[str, LazyArray]:
    tied = {name: contents.arrays[first] for name, first in contents.ties.items()}
    return {**contents.arrays, **tied}


class _Patched(LazyArray):
    """An array with codes applied to its bits, one after the other, when it is read."""

    def __init__(self, array: LazyArray, codes: list[LazyArray]) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self._bits = bits_of(array)
        self._changes = [Changes(code, self._bits.size, self._bits.dtype) for code in codes]

    def _read(self, box: Box) -> Any:
        import numpy as np

        ends = flat_range(box, self.shape)
        if ends is None:  # its elements are not contiguous
            rows = (box[0], *full_box(self.shape[1:]))
            return self._read(rows)[(slice(None), *box_slices(box[1:]))]
        words = self.dtype.itemsize // self._bits.dtype.itemsize
        start, stop = (end * words for end in ends)
        bits = self._bits.read(((start, stop),), np.empty(stop - start, self._bits.dtype))
        for changes in self._changes:
            changes.apply(bits, start)
        return bits.view(self.dtype).reshape(box_shape(box))


def _patch_all(state: _State, deltas: list[_Delta]) -> dict[str, LazyArray]:
    """Returns the arrays after all deltas; those of one base and one code are one object."""
    made: dict[tuple[int, ...], LazyArray] = {}
    named: dict[str, LazyArray] = {}
    for name in deltas[0].base:
        array = state.arrays[name]
        codes = [delta.codes[name] for delta in deltas if name in delta.codes]
        key = (id(array), *map(id, codes))
        try:
            if key not in made:
                made[key] = _Patched(array, codes) if codes else array
        except CheckpointError as error:
            raise CheckpointError(f"{show(name)}: {error}") from None
        named[name] = made[key]
    return named


class _Delta(NamedTuple):
    """A delta in a file: what identifies its base and its result, and the codes between them."""

    path: Any
    contents: Contents
    base: dict[str, _Outline]
    result: dict[str, _Outline]
    codes: dict[str, LazyArray]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> _Delta:
        place = place_of(path)
        contents = contents_of_tree(read_checkpoint(place, Safetensors.name))
        codes = _by_name(contents)
        try:
            if _KEY not in contents.metadata:
                raise Misfit("is not a delta, which save_delta writes")
            about = read_json(contents.metadata[_KEY])
            if type(about) is not dict or about.get("version") != 1:
                raise Misfit("is a delta of another version of fmapper")
            table: Any = about.get("arrays")
            rows: Any = table.values() if type(table) is dict else [None]
            for row in rows:
                is_row = type(row) is list and [*map(type, row)] == [str, list, str, str]
                is_row = is_row and all(map(_DIGEST.fullmatch, row[2:]))
                if not is_row or not all(type(size) is int and size >= 0 for size in row[1]):
                    raise Misfit("is damaged: it lacks the table of its arrays")
            if codes.keys() != {name for name, row in table.items() if row[2] != row[3]}:
                raise Misfit("is damaged: it lacks the codes of arrays, or has too many")
            for name, code in codes.items():
                if (code.dtype.name, code.ndim) != ("uint8", 1):
                    raise Misfit(f"is damaged: {show(name)} is not a code")
        except Misfit as error:
            raise CheckpointError(f"{place}: {error}") from None
        base, result = (
            {name: _Outline(row[0], (*row[1],), row[at]) for name, row in table.items()}
            for at in (2, 3)
        )
        return cls(place, contents, base, result, codes)
