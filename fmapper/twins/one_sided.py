"""Parts of one side alone: counters, random states, ties, a second bias of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.dtypes import is_inexact
from fmapper.errors import TransferError
from fmapper.tree.pattern import Pattern, pattern
from fmapper.twins.matches import Decision
from fmapper.twins.sides import Entry, Side
from fmapper.twins.words import words_of

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rule import Rule
    from fmapper.checkpoints.rules.rules import Rules

# Of batch norms in torch: how many batches there were. No other framework counts them.
_COUNTERS = ("num_batches_tracked",)
_WORDS = {"key<fry>": 2, "key<rbg>": 4, "key<urbg>": 4}  # of a random key, by its dtype


def is_kept(entry: Entry, keep: Sequence[str]) -> bool:
    """Returns whether an array of the target is one that is to stay as it is."""
    return any(pattern(text).match(entry.name) is not None for text in keep)


def is_counter(entry: Entry) -> bool:
    """Returns whether an array counts calls, which no other framework does."""
    return entry.name.endswith(_COUNTERS)


def is_needed(entry: Entry) -> bool:
    """Returns whether an array of the source must have a place in the target."""
    is_weight = entry.trained or words_of(entry.name).leaf in ("mean", "var")
    return is_weight and not (entry.random or entry.transient or is_counter(entry))


def is_free(entry: Entry) -> bool:
    """Returns whether an array of the target may stay as it is without being asked for."""
    return entry.random or is_counter(entry) or (entry.transient and not entry.is_abstract)


def zeros(b: Side, keep: Sequence[str]) -> dict[str, Any]:
    """Returns zeros for counters and random states of the target that have no values.

    Random keys of JAX then have the seed 0.
    """
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

    They are equal, as where the target ties what the source has twice.

    Raises:
        TransferError: They differ.
    """
    ties = {}
    seconds = {entry.tied_to for entry in b.entries.values()} - {""}
    for name in needed:
        entry = a.entries[name]
        for match, other in [(d.match, e) for d in decisions for e in d.match.used]:
            if sorted(other.shape) != sorted(entry.shape) or len(entry.shape) < 2:
                continue
            if _equal(entry, other):
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


def _equal(a: Entry, b: Entry) -> bool:
    import numpy as np

    if a.shape != b.shape or a.dtype != b.dtype or a.is_abstract or b.is_abstract:
        return False
    return np.array_equal(a.lazy().read(), b.lazy().read())


class Variant(NamedTuple):
    """Both sides, where one has what the other lacks."""

    a: Side
    b: Side
    first: Rules  # that make the arrays of the source those of `a`
    last: Rules  # that make the arrays of `b` those of the target
    unsure: str = ""  # the name of an array that only outputs can settle


def variants(a: Side, b: Side) -> Iterator[Variant]:
    """Yields both sides as they are, then with one bias in each recurrent layer or rows cut."""
    from fmapper.checkpoints.rules.rules import Rules

    yield Variant(a, b, Rules(), Rules())
    source, first, _ = _with_one_bias(a)
    if first:
        yield Variant(source, b, Rules(first), Rules())
    target, _, last = _with_one_bias(b)
    if last:
        yield Variant(a, target, Rules(), Rules(last))
    yield from _with_rows_cut(a, b)


def _with_one_bias(side: Side) -> tuple[Side, list[Rule], list[Rule]]:
    """Returns a side with one bias for the two of each recurrent layer, and the rules both ways.

    Both are added in an LSTM. In the last gate of a GRU, another gate multiplies that of the hidden
    state, which stays apart as `bias_hn`. On the way back, zeros are where it was added.
    """
    from fmapper.checkpoints.rules.arithmetic import Sum
    from fmapper.checkpoints.rules.joining import Concatenate, Split
    from fmapper.checkpoints.rules.naming import AddConstant, Drop, Rename, Tie

    entries = dict(side.entries)
    there: list[Rule] = []
    back: list[Rule] = []
    for name, entry in side.entries.items():
        weight = side.entries.get(name.replace("bias_hh", "weight_hh"))
        inputs = name.replace("bias_hh", "bias_ih")
        if "bias_hh" not in name or weight is None or inputs not in entries or entry.tied_to:
            continue
        (rows, columns), hidden, added = weight.shape, Pattern.escape(name), Pattern.escape(inputs)
        if rows not in (columns, 3 * columns, 4 * columns):
            continue
        for second, of in [(n, e.tied_to) for n, e in entries.items() if e.tied_to]:
            if of in (name, inputs):
                there.append(Drop(Pattern.escape(second), tied_to=Pattern.escape(of)))
                back.append(Tie(Pattern.escape(of), Pattern.escape(second)))
                del entries[second]
        if rows != 3 * columns:
            there.append(Sum([added, hidden], added))
            back.insert(0, AddConstant(hidden, entry.shape, 0.0, entry.dtype))
            del entries[name]
            continue
        last, sizes = name.replace("bias_hh", "bias_hn"), [2 * columns, columns]
        gates = [f"{added}.gates", f"{hidden}.gates"]
        there += [
            Split(added, [gates[0], f"{added}.last"], 0, sizes),
            Split(hidden, [gates[1], f"{hidden}.last"], 0, sizes),
            Sum(gates, gates[0]),
            Concatenate([gates[0], f"{added}.last"], added, 0, sizes),
            Rename(f"{hidden}.last", Pattern.escape(last)),
        ]
        back = [
            AddConstant(gates[1], [2 * columns], 0.0, entry.dtype),
            Concatenate([gates[1], Pattern.escape(last)], hidden, 0, sizes),
            *back,
        ]
        apart = replace(entry, name=last, shape=(columns,))
        entries = dict((last, apart) if n == name else (n, e) for n, e in entries.items())
    return replace(side, entries=entries), there, back


def _with_rows_cut(a: Side, b: Side) -> Iterator[Variant]:
    """Yields the sides without the first rows of a table if a single one of the source has more.

    Some models have rows before that of the first position, which they never look up.
    """
    from fmapper.checkpoints.rules.joining import Split
    from fmapper.checkpoints.rules.naming import Drop
    from fmapper.checkpoints.rules.rules import Rules

    tables = _tables(a, b), _tables(b, a)
    if tuple(map(len, tables)) != (1, 1):
        return
    (table,), (other,) = tables
    more = table.shape[0] - other.shape[0]
    if more > 0 and table.shape[1] == other.shape[1]:
        text, sizes = Pattern.escape(table.name), [more, other.shape[0]]
        rules = Rules([Split(text, [f"{text}.unused", text], 0, sizes), Drop(f"{text}.unused")])
        cut = replace(table, shape=other.shape, value=table.lazy().slice(more, table.shape[0]))
        source = replace(a, entries={**a.entries, table.name: cut})
        yield Variant(source, b, rules, Rules(), table.name)


def _tables(side: Side, other: Side) -> list[Entry]:
    """Returns the tables of a side whose size no array of the other has."""
    sizes = {prod(entry.shape) for entry in other.entries.values()}
    return [
        entry
        for entry in side.entries.values()
        if len(entry.shape) == 2 and entry.layout in ("rows", "") and prod(entry.shape) not in sizes
    ]
