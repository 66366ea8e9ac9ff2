"""Decisions as operations on lazy arrays, and the rules that these give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
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
        for parts, entry in decision.match.rows():
            shapes = [[part.shape for part in group] for group in parts]
            if decision.match.back:
                divided = _divide(arrays[entry.name], decision.option, shapes, entry.shape)
                for group, pieces in zip(parts, divided, strict=True):
                    made.update(zip((part.name for part in group), pieces, strict=True))
            else:
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


def _divide(
    array: LazyArray, option: Option, shapes: list[list[Shape]], shape: Shape
) -> list[list[LazyArray]]:
    """Divides an array into what would be joined to it."""
    pieces: list[list[LazyArray]] = [[] for _ in shapes]
    before = Layout(option.after).inverse()
    for row, joined in enumerate(map(before.apply, _unstack(array, option.axes))):
        parts = [joined]
        if len(shapes) > 1 and option.new:
            parts = joined.unstack(option.axis)
        elif len(shapes) > 1:
            size = joined.size // joined.shape[option.axis]
            sizes = [prod(shapes[at][row]) // size for at in option.order]
            parts = joined.split(sizes, option.axis)
        for at, part in zip(option.order, parts, strict=True):
            layout = option.layouts[at][shapes[at][row], shape]
            pieces[at].append(layout.inverse().apply(part))
    return pieces


def _unstack(array: LazyArray, axes: tuple[int, ...]) -> Iterator[LazyArray]:
    if not axes:
        yield array
        return
    for part in array.unstack(axes[0]):
        yield from _unstack(part, axes[1:])


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
