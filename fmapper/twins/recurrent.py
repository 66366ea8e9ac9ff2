"""The two biases of torch's recurrent layers, where others have one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fmapper.tree.pattern import Pattern
from fmapper.twins.sides import Side

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rule import Rule
    from fmapper.checkpoints.rules.rules import Rules


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
