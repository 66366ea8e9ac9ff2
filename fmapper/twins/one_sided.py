"""Parts of one side alone: counters, random states, ties, a second bias of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fmapper.backends.dtypes import is_inexact
from fmapper.errors import TransferError
from fmapper.tree.pattern import pattern
from fmapper.twins.matches import Decision
from fmapper.twins.sides import Entry, Side
from fmapper.twins.words import words_of

if TYPE_CHECKING:
    from fmapper.checkpoints.lazy import LazyArray

Arrays: TypeAlias = "dict[str, LazyArray]"
Change: TypeAlias = Callable[[Arrays], Arrays]

_WORDS = {"key<fry>": 2, "key<rbg>": 4, "key<urbg>": 4}  # of a random key, by its dtype


def is_kept(entry: Entry, keep: Sequence[str]) -> bool:
    """Returns whether an array of the target is one that is to stay as it is."""
    return any(pattern(text).match(entry.name) is not None for text in keep)


def is_counter(entry: Entry) -> bool:
    """Returns whether an array counts the batches of a norm, as only torch does."""
    return entry.name.endswith("num_batches_tracked")


def is_needed(entry: Entry) -> bool:
    """Returns whether an array of the source must have a place in the target."""
    is_weight = entry.trained or words_of(entry.name).leaf in ("mean", "var")
    return is_weight and not (entry.random or entry.transient or is_counter(entry))


def is_free(entry: Entry) -> bool:
    """Returns whether an array of the target may stay as it is without being asked for."""
    return entry.random or is_counter(entry) or (entry.transient and not entry.is_abstract)


def zeros(b: Side, keep: Sequence[str]) -> dict[str, Any]:
    """Returns zeros for counters and random states of the target, keys too, without values."""
    import numpy as np

    return {
        entry.name: np.zeros((*entry.shape, _WORDS[entry.dtype]), np.uint32)
        if entry.dtype in _WORDS
        else entry.lazy()
        for entry in b.entries.values()
        if entry.is_abstract and is_free(entry) and not is_kept(entry, keep)
    }


def has_nan(entry: Entry) -> bool:
    """Returns whether an array has values that are not numbers."""
    import numpy as np

    if entry.is_abstract or entry.tied_to or not is_inexact(entry.dtype):
        return False
    return bool(np.isnan(entry.lazy().read()).any())


def ties_of(
    needed: Sequence[str], decisions: Sequence[Decision], a: Side, b: Side
) -> Mapping[str, str]:
    """Returns for arrays of the source that have no place those in the place of which they go.

    Raises:
        TransferError: They differ.
    """
    import numpy as np

    ties = {}
    seconds = {entry.tied_to for entry in b.entries.values()} - {""}
    for name in needed:
        entry = a.entries[name]
        for match, other in [(d.match, e) for d in decisions for e in d.match.used]:
            if sorted(other.shape) != sorted(entry.shape) or len(entry.shape) < 2:
                continue
            concrete = entry.dtype == other.dtype and not (entry.is_abstract or other.is_abstract)
            if concrete and np.array_equal(entry.lazy().read(), other.lazy().read()):
                ties[name] = other.name
                break
            names = {filled.name for filled in match.filled}
            if names & seconds:
                raise TransferError(
                    f"{name} and {other.name} have different values in the source, but the target "
                    f"has one array for both, {', '.join(sorted(names))}. Untie that, or drop one "
                    "of them with rules="
                )
    return ties


class Variant(NamedTuple):
    """Both sides, where one has what the other lacks."""

    a: Side
    b: Side
    first: Change = dict  # makes the arrays of `a` of those of the source
    last: Change = dict  # makes the arrays of the target of those of `b`
    unsure: str = ""  # the name of an array that only outputs can settle


def variants(a: Side, b: Side) -> Iterator[Variant]:
    """Yields both sides as they are, then with one bias in each recurrent layer or rows cut."""
    yield Variant(a, b)
    source, target = _with_one_bias(a), _with_one_bias(b)
    if source is not None:
        yield Variant(source[0], b, first=source[1])
    if target is not None:
        yield Variant(a, target[0], last=target[2])
    tables = _tables(a, b), _tables(b, a)
    if tuple(map(len, tables)) == (1, 1):
        (table,), (other,) = tables
        more = table.shape[0] - other.shape[0]
        if more > 0 and table.shape[1] == other.shape[1]:
            # Some models have rows before that of the first position, which they never look up.
            cut = replace(table, shape=other.shape)
            yield Variant(
                replace(a, entries={**a.entries, table.name: cut}),
                b,
                lambda x: {**x, table.name: x[table.name].slice(more, table.shape[0])},
                unsure=table.name,
            )


def _with_one_bias(side: Side) -> tuple[Side, Change, Change] | None:
    """Returns a side with one bias for the two of each recurrent layer, the way there, and back.

    In the last gate of a GRU, another gate multiplies the hidden bias, which stays apart.
    """
    from fmapper.checkpoints.lazy import LazyArray, add, concatenate

    cells: list[tuple[str, str, str, int]] = []  # names of the biases, size of the hidden state
    entries: dict[str, Entry] = {}
    for name, entry in side.entries.items():
        inputs, kernel = (name.replace("bias_hh", other) for other in ("bias_ih", "weight_hh"))
        is_hidden = name != kernel and not entry.tied_to and {inputs, kernel} <= {*side.entries}
        rows, columns = side.entries[kernel].shape if is_hidden else (0, 1)
        if rows not in (columns, 3 * columns, 4 * columns):
            entries[name] = entry
            continue
        last = name.replace("bias_hh", "bias_hn") if rows == 3 * columns else ""
        cells.append((inputs, name, last, columns))
        if last:
            entries[last] = replace(entry, name=last, shape=(columns,))

    def there(given: Arrays) -> Arrays:
        arrays = dict(given)
        for inputs, hidden, last, size in cells:
            x, y = arrays[inputs], arrays.pop(hidden)
            if last:
                (gates, n), (others, arrays[last]) = (z.split([2 * size, size]) for z in (x, y))
                arrays[inputs] = concatenate([add([gates, others]), n])
            else:
                arrays[inputs] = add([x, y])
        return arrays

    def back(given: Arrays) -> Arrays:
        arrays = dict(given)
        for inputs, hidden, last, size in cells:
            x = arrays[inputs]
            zeros = LazyArray.full((2 * size,) if last else x.shape, 0, x.dtype)
            arrays[hidden] = concatenate([zeros, arrays.pop(last)]) if last else zeros
        return arrays

    return (replace(side, entries=entries), there, back) if cells else None


def _tables(side: Side, other: Side) -> list[Entry]:
    """Returns the tables of a side whose size no array of the other has."""
    sizes = {prod(entry.shape) for entry in other.entries.values()}
    return [
        entry
        for entry in side.entries.values()
        if len(entry.shape) == 2 and entry.layout in ("rows", "") and prod(entry.shape) not in sizes
    ]
