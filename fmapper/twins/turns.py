"""The orders that elements of one dimension may have, of which shapes say nothing."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from dataclasses import replace
from itertools import permutations, product
from typing import TypeAlias

from fmapper.twins.layouts import Layout, Shape, Steps
from fmapper.twins.matches import Match, Option

# The order of equal blocks, or (outer, inner, rest): the numbers of parts that are exchanged.
Turn: TypeAlias = tuple[str, tuple[int, ...]]

_OUTPUTS = ("outputs first", "outputs last")  # by the axis of the outputs of a matrix


def _after(match: Match, steps: Steps) -> Iterator[Option]:
    """Yields the first options of a match with steps before their own."""
    for option in match.options[:2]:
        known = {
            pair: Layout((*steps, *layout.steps)) for pair, layout in option.layouts[0].items()
        }
        yield Option((known,), option.axes)


def _exchange(shape: Shape, axis: int, outer: int, inner: int, rest: int = 1) -> Steps:
    """Returns the steps that exchange the outer and inner parts of a dimension."""
    parts = (outer, inner, rest) if rest > 1 else (outer, inner)
    split = (*shape[:axis], *parts, *shape[axis + 1 :])
    axes = [*range(len(split))]
    axes[axis], axes[axis + 1] = axis + 1, axis
    turned = tuple(split[at] for at in axes)
    return (("reshape", split, shape), ("transpose", tuple(axes)), ("reshape", shape, turned))


def rotations(match: Match) -> Iterator[Option]:
    """Yields the options of a match with the halves of each head interleaved, and the reverse.

    Rotary positions turn pairs of elements that are neighbours, or that are half a head apart.
    """
    if len(match.many) > 1:
        return
    shape = match.many[0].shapes[0]
    layout = match.many[0].entries[0].layout
    axes = {"outputs first": (0,), "outputs last": (len(shape) - 1,)}.get(layout, range(len(shape)))
    for back, axis in product((True, False), axes):
        size = shape[axis]
        for head in range(size, 3, -1) if len(shape) < 3 else (size,):
            if size % head or head % 2:
                continue
            split = (*shape[:axis], size // head, head, *shape[axis + 1 :])
            steps: Steps = (("interleave", 2, axis, back),)
            if size > head:
                turn = ("interleave", 2, axis + 1, back)
                steps = (("reshape", split, shape), turn, ("reshape", shape, split))
            yield from _after(match, steps)


def flattenings(match: Match, channels: set[int], known: Container[int]) -> Iterator[Option]:
    """Yields the options of a matrix that takes flattened images, with channels last or first.

    It takes a number of inputs that nothing else has, a multiple of the channels of a convolution.

    Args:
        match: The match.
        channels: The numbers of outputs of convolutions.
        known: The sizes that other arrays have.
    """
    shape = match.many[0].shapes[0]
    if len(match.many) > 1 or match.over or len(shape) != 2 or len(match.one.shapes[0]) != 2:
        return
    for axis in (0, 1):
        size = shape[axis]
        if size in known or match.many[0].entries[0].layout == _OUTPUTS[axis]:
            continue
        for count in sorted(n for n in channels if size % n == 0 and 1 < n < size):
            for outer, inner in ((count, size // count), (size // count, count)):
                yield from _after(match, _exchange(shape, axis, outer, inner))


def offsets(match: Match) -> Iterator[Option]:
    """Yields the options of a match with one added to the weights, or subtracted.

    Some norms multiply by one more than their weights, which are zeros at first.
    """
    if len(match.many) == 1 and all(len(shape) == 1 for shape in match.many[0].shapes):
        for value in (1.0, -1.0):
            yield from _after(replace(match, options=match.options[:1]), (("offset", value),))


def turns(match: Match, sizes: Collection[int]) -> Iterator[tuple[int, Turn]]:
    """Yields sizes of a match, and what may be turned there: parts that are fused in a dimension.

    Those are the gates of a recurrent cell, queries with keys and values, or gate with up; whole
    ones after each other, or those of each head.

    Args:
        match: The match.
        sizes: The sizes of all arrays, of which a part has one.
    """
    shape = match.one.shapes[0]
    for size, count in product(dict.fromkeys(shape[:: len(shape) - 1 or 1]), (2, 3, 4)):
        part = size // count
        if size % count or part not in sizes:
            continue
        if len(match.many) == 1:
            for order in permutations(range(count)):
                if order != tuple(range(count)):
                    yield size, ("blocks", order)
        for heads in range(2, part):
            if part % heads == 0:
                yield size, ("heads", (count, heads, part // heads))
                yield size, ("heads", (heads, count, part // heads))


def turned(match: Match, option: Option, size: int, turn: Turn) -> Option | None:
    """Returns an option with a turn in the dimension of a size; None where there is none.

    Args:
        match: The match.
        option: One of its options.
        size: The size.
        turn: The turn.
    """
    group = match.one if len(match.many) > 1 else match.many[0]
    shape, layout = group.shapes[0], group.entries[0].layout
    axes = [at for at, n in enumerate(shape) if n == size]
    usual = {"outputs first": 0, "outputs last": len(shape) - 1}.get(layout)
    axis = usual if usual in axes else axes[0] if axes and usual is None else None
    if axis is None or len({*group.shapes}) > 1:
        return None
    kind, numbers = turn
    steps: Steps = (("blocks", numbers, axis),)
    if kind == "heads":
        steps = _exchange(shape, axis, *numbers)
    if len(match.many) > 1:
        return replace(option, after=steps)
    return next(_after(replace(match, options=(option,)), steps))
