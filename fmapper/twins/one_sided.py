"""Parts of one side alone: counters, random states, ties, a second bias of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from fmapper.backends.dtypes import is_inexact
from fmapper.checkpoints.lazy import LazyArray
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


def zeros(b: Side, keep: Sequence[str]) -> dict[str, Any]:
    """Returns zeros for counters and random states of the target that have no values.

    Random keys of JAX then have the seed 0.
    """
    import numpy as np

    from fmapper.files.dtypes import numpy_dtype

    free = [
        entry
        for entry in b.entries.values()
        if entry.is_abstract and (entry.random or is_counter(entry)) and not is_kept(entry, keep)
    ]
    return {
        entry.name: np.zeros((*entry.shape, _WORDS[entry.dtype]), np.uint32)
        if entry.dtype in _WORDS
        else np.zeros(entry.shape, numpy_dtype(entry.dtype))
        for entry in free
    }


def has_nan(entry: Entry) -> bool:
    """Returns whether an array has values that are not numbers."""
    import numpy as np

    from fmapper.moves.mover import to_numpy

    if entry.is_abstract or entry.tied_to or not is_inexact(entry.dtype):
        return False
    value = entry.value
    array = value.read() if isinstance(value, LazyArray) else to_numpy(value, copy=None)
    return bool(np.isnan(array).any())


def ties_of(
    needed: Sequence[str], decisions: Sequence[Decision], a: Side, b: Side
) -> Mapping[str, str]:
    """Returns for arrays of the source that have no place those in the place of which they go.

    They are equal, as where the target ties what the source has twice.

    Raises:
        TransferError: They differ.
    """
    ties = {}
    taken = [(decision, entry) for decision in decisions for entry in decision.match.used]
    for name in needed:
        entry = a.entries[name]
        for decision, other in taken:
            if sorted(other.shape) != sorted(entry.shape) or len(entry.shape) < 2:
                continue
            if _equal(entry, other):
                ties[name] = other.name
                break
            tied = [e.name for e in b.entries.values() if e.tied_to]
            names = {entry.name for entry in decision.match.filled}
            if names & {b.entries[second].tied_to for second in tied}:
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


def with_added_biases(side: Side) -> tuple[Side, Rules] | None:
    """Returns a side with one bias for the two of each recurrent layer, and the rules for that.

    Both are added in an LSTM. In the last gate of a GRU, another gate multiplies that of the hidden
    state, which stays apart as `bias_hn`.

    Returns:
        None where there are no such layers.
    """
    from fmapper.checkpoints.rules.arithmetic import Sum
    from fmapper.checkpoints.rules.joining import Concatenate, Split
    from fmapper.checkpoints.rules.naming import Drop, Rename
    from fmapper.checkpoints.rules.rules import Rules

    entries = dict(side.entries)
    rules: list[Rule] = []
    for name in side.entries:
        weight = side.entries.get(name.replace("bias_hh", "weight_hh"))
        inputs = name.replace("bias_hh", "bias_ih")
        if "bias_hh" not in name or weight is None or inputs not in side.entries:
            continue
        for second in [n for n, e in side.entries.items() if e.tied_to in (name, inputs)]:
            first = Pattern.escape(entries[second].tied_to)
            rules.append(Drop(Pattern.escape(second), tied_to=first))
            del entries[second]
        rows, columns = weight.shape
        hidden, added = Pattern.escape(name), Pattern.escape(inputs)
        if rows in (columns, 4 * columns):
            rules.append(Sum([added, hidden], added))
            del entries[name]
        elif rows == 3 * columns:
            last = name.replace("bias_hh", "bias_hn")
            parts = [[f"{text}.{part}" for part in ("gates", "last")] for text in (added, hidden)]
            sizes = [2 * columns, columns]
            rules += [
                *(Split(a, to, 0, sizes) for a, to in zip((added, hidden), parts, strict=True)),
                Sum([parts[0][0], parts[1][0]], parts[0][0]),
                Concatenate(parts[0], added, 0, sizes),
                Rename(parts[1][1], Pattern.escape(last)),
            ]
            entries = {  # in the place of the other
                new: replace(old, name=new, shape=(columns,)) if new == last else old
                for key, old in entries.items()
                for new in [last if key == name else key]
            }
    return (replace(side, entries=entries), Rules(rules)) if rules else None


def with_one_bias(side: Side) -> tuple[Side, Rules] | None:
    """Returns a target with one bias for the two of each recurrent layer, and the rules for both.

    The second one is then zero, or has the part of the last gate of a GRU alone.

    Returns:
        None where there are no such layers.
    """
    from fmapper.checkpoints.rules.joining import Concatenate
    from fmapper.checkpoints.rules.naming import AddConstant, Tie
    from fmapper.checkpoints.rules.rules import Rules

    added = with_added_biases(side)
    if added is None:
        return None
    rules: list[Rule] = []
    for name, entry in side.entries.items():
        last = name.replace("bias_hh", "bias_hn")
        if name in added[0].entries or entry.tied_to:
            continue
        text = Pattern.escape(name)
        if last not in added[0].entries:
            rules.append(AddConstant(text, entry.shape, 0.0, entry.dtype))
            continue
        (size,), (part,) = entry.shape, added[0].entries[last].shape
        rules += [
            AddConstant(f"{text}.gates", [size - part], 0.0, entry.dtype),
            Concatenate([f"{text}.gates", Pattern.escape(last)], text, 0, [size - part, part]),
        ]
    rules += [
        Tie(Pattern.escape(entry.tied_to), Pattern.escape(name))
        for name, entry in side.entries.items()
        if entry.tied_to and name not in added[0].entries
    ]
    return added[0], Rules(rules)


def with_rows_cut(a: Side, b: Side) -> tuple[Side, Rules, str] | None:
    """Returns a side without the first rows of a table, the rules for that, and its name.

    Some models have rows before that of the first position, which they never look up.

    Returns:
        None where no single table of the target has fewer rows than one of the source.
    """
    from fmapper.checkpoints.rules.joining import Split
    from fmapper.checkpoints.rules.naming import Drop
    from fmapper.checkpoints.rules.rules import Rules

    mine, theirs = _tables(a, b), _tables(b, a)
    if len(mine) != 1 or len(theirs) != 1:
        return None
    (table,), (other,) = mine, theirs
    more = table.shape[0] - other.shape[0]
    if more < 1 or table.shape[1] != other.shape[1]:
        return None
    text = Pattern.escape(table.name)
    sizes = [more, other.shape[0]]
    rules = Rules([Split(text, [f"{text}.unused", text], 0, sizes), Drop(f"{text}.unused")])
    cut = replace(table, shape=other.shape, value=table.lazy().slice(more, table.shape[0]))
    return replace(a, entries={**a.entries, table.name: cut}), rules, table.name


def _tables(side: Side, other: Side) -> list[Entry]:
    """Returns the tables of a side whose size no array of the other has."""
    sizes = {prod(entry.shape) for entry in other.entries.values()}
    return [
        entry
        for entry in side.entries.values()
        if len(entry.shape) == 2 and entry.layout in ("rows", "") and prod(entry.shape) not in sizes
    ]
