"""Decisions as operations on lazy arrays, and the rules that these give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fmapper.checkpoints.lazy import LazyArray, concatenate, stack
from fmapper.twins.layouts import Layout, Shape
from fmapper.twins.matches import Decision, Option
from fmapper.twins.sides import Entry

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules


def make(decisions: Iterable[Decision], arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Makes the arrays of the target of those of the source."""
    made: dict[str, LazyArray] = {}
    for decision in decisions:
        match = decision.match
        if match.back:
            there = derive(match.filled, partial(_joined, decision))
            made |= there.inverse().apply({entry.name: arrays[entry.name] for entry in match.used})
        else:
            made |= _joined(decision, arrays)
    return made


def _joined(decision: Decision, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Makes the arrays of the one group of a match of those of the many."""
    made = {}
    for parts, entry in decision.match.rows():
        shapes = [[part.shape for part in group] for group in parts]
        blocks = [[arrays[part.name] for part in group] for group in parts]
        made[entry.name] = _join(blocks, decision.option, shapes, entry.shape)
    return made


def _join(
    pieces: list[list[LazyArray]], option: Option, shapes: list[list[Shape]], shape: Shape
) -> LazyArray:
    """Joins the arrays of several groups, each a list by the numbers that are stacked."""
    rows = [
        [option.layouts[at][shapes[at][row], shape].apply(x) for at, x in enumerate(parts)]
        for row, parts in enumerate(zip(*pieces, strict=True))
    ]
    if len(pieces) == 1:
        return _stack([row[0] for row in rows], option.axes, shape)
    join = stack if option.new else concatenate
    joined = (join([row[at] for at in option.order], option.axis) for row in rows)
    return _stack([*map(Layout(option.after).apply, joined)], option.axes, shape)


def _stack(arrays: Sequence[LazyArray], axes: tuple[int, ...], shape: Shape) -> LazyArray:
    if not axes:
        return arrays[0]
    axis, *inner = axes
    size = len(arrays) // shape[axis]
    rest = shape[:axis] + shape[axis + 1 :]
    blocks = (arrays[at : at + size] for at in range(0, len(arrays), size))
    return stack([_stack(block, tuple(inner), rest) for block in blocks], axis)


def rules_of(decisions: Sequence[Decision]) -> Rules:
    """Returns the rules for the arrays of some decisions alone."""
    return derive([e for d in decisions for e in d.match.used], lambda x: make(decisions, x))


def derive(
    entries: Iterable[Entry], change: Callable[[dict[str, LazyArray]], Mapping[str, LazyArray]]
) -> Rules:
    """Returns the rules for what a function does with arrays."""
    from fmapper.checkpoints.recording.abstract import Named
    from fmapper.checkpoints.recording.record import derive_rules
    from fmapper.files.dtypes import numpy_dtype

    named: dict[str, LazyArray] = {
        e.name: Named(e.name, e.shape, numpy_dtype(e.dtype)) for e in entries
    }
    return derive_rules(change(named), [*named])
