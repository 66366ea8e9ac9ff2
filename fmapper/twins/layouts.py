"""The layouts that one array may have in two models, and which of them layers of libraries have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations
from typing import Any, TypeAlias

from fmapper.checkpoints.lazy import LazyArray, concatenate

Shape: TypeAlias = tuple[int, ...]
# `("transpose", axes)`, `("reshape", shape, shape before)`, `("blocks", order, axis)` or
# `("offset", value)`
Steps: TypeAlias = tuple[tuple[Any, ...], ...]

# Where a layer has the outputs of a matrix or kernel; see `Models.weight_layouts`.
FIRST, LAST, _TABLE = "outputs first", "outputs last", "rows"
_MOST_AXES = 5


@dataclass(frozen=True, slots=True)
class Layout:
    """A change of layout as steps."""

    steps: Steps = ()
    certain: bool = False  # the classes of both layers say so, or nothing else fits

    def apply(self, array: LazyArray) -> LazyArray:
        """Changes an array."""
        for kind, value, *rest in self.steps:
            if kind == "transpose":
                array = array.transpose(value)
            elif kind == "reshape":
                array = array.reshape(value)
            elif kind == "offset":
                array = array.plus(value)
            else:  # equal parts in another order
                parts = array.split(len(value), *rest)
                array = concatenate([parts[at] for at in value], *rest)
        return array

    def inverse(self) -> Layout:
        """Returns the way back."""
        steps: list[tuple[Any, ...]] = []
        for kind, *values in reversed(self.steps):
            if kind == "reshape":
                steps.append((kind, *reversed(values)))
            elif kind == "offset":
                steps.append((kind, -values[0]))
            else:
                order, *rest = values
                steps.append((kind, tuple(map(order.index, range(len(order)))), *rest))
        return Layout(tuple(steps))

    @property
    def kind(self) -> object:
        """The steps without the sizes of reshapes."""
        return tuple(step[:2] if step[0] == "transpose" else step[:1] for step in self.steps)

    def __str__(self) -> str:
        values = ((k, x if isinstance(x, tuple) else (x,)) for k, x, *_ in self.steps)
        return ", ".join(f"{kind} {'x'.join(map(str, value))}" for kind, value in values)


@cache
def layouts(shape: Shape, wanted: Shape, a: str = "", b: str = "") -> tuple[Layout, ...]:
    """Returns the layouts by which an array of a shape can become one of another, the best first.

    The layers of both may say where they have their outputs.
    """
    if math.prod(shape) != math.prod(wanted) or max(len(shape), len(wanted)) > _MOST_AXES:
        return ()
    if len([n for n in shape if n != 1]) <= 1 or 0 in shape:
        return (Layout(_reshape(shape, wanted), certain=True),)
    conventional = _by_convention(a, b, shape, wanted)
    if conventional is not None:
        return (Layout(conventional, certain=True),)
    options = sorted(_options(shape, wanted), key=lambda option: not option[1])
    usual = sum(is_usual for _, is_usual in options)
    return tuple(Layout(steps, certain=usual == 1 and is_usual) for steps, is_usual in options)


def _by_convention(a: str, b: str, shape: Shape, wanted: Shape) -> Steps | None:
    if not a or not b or (_TABLE in (a, b) and a != b):
        return None
    if a == b:
        steps = _reshape(shape, wanted)
        return steps if shape == wanted or _is_regrouping(shape, wanted) else None
    if len(shape) < 2:
        return None
    if a == LAST:
        back = _by_convention(b, a, wanted, shape)
        return None if back is None else Layout(back).inverse().steps
    axes = (*range(2, len(shape)), 1, 0)
    turned = _permute(shape, axes)
    folds = len(shape) == 2 < len(wanted) and _is_regrouping(turned, wanted)  # heads
    if turned != wanted and not folds:
        return None
    return (("transpose", axes), *_reshape(turned, wanted))


def _reshape(shape: Shape, wanted: Shape) -> Steps:
    return () if shape == wanted else (("reshape", wanted, shape),)


def _is_regrouping(shape: Shape, wanted: Shape) -> bool:
    """Returns whether a reshape splits or merges dimensions, but does not do both to any."""
    return _owners(shape, wanted) is not None or _owners(wanted, shape) is not None


def _owners(shape: Shape, parts: Shape) -> list[int] | None:
    """Returns for each part the dimension that it is of; None if they are no such parts."""
    owners: list[int] = []
    left, at = 1, -1
    for part in parts:
        while left == 1 and part > 1 and at + 1 < len(shape):
            at += 1
            left = shape[at]
        if left % part:
            return None
        left //= part
        owners.append(at)
    return owners if left == 1 and all(n == 1 for n in shape[at + 1 :]) else None


def _options(shape: Shape, wanted: Shape) -> Iterator[tuple[Steps, bool]]:
    """Yields the steps from one shape to another, and whether parts of dimensions stay in order."""
    if len(shape) == len(wanted):
        every = (*dict.fromkeys(_usual(len(shape))),), (*permutations(range(len(shape))),)
        fitting = [[axes for axes in of if _permute(shape, axes) == wanted] for of in every]
        yield from ((_transpose(axes), True) for axes in fitting[0] or fitting[1])
    elif 1 in (*shape, *wanted):
        core, wanted_core = (tuple(n for n in sizes if n > 1) for sizes in (shape, wanted))
        for steps, is_usual in _options(core, wanted_core):
            yield (*_reshape(shape, core), *steps, *_reshape(wanted_core, wanted)), is_usual
    elif len(shape) < len(wanted):
        for axes in permutations(range(len(wanted))):
            before = tuple(wanted[axes.index(axis)] for axis in range(len(wanted)))
            owners = _owners(shape, before)
            if owners is not None:
                steps = (*_reshape(shape, before), *_transpose(axes))
                yield steps, _keeps(owners, axes)
    else:
        yield from ((Layout(x).inverse().steps, usual) for x, usual in _options(wanted, shape))


def _keeps(owners: Sequence[int], axes: Sequence[int]) -> bool:
    """Returns whether the parts of each dimension are in their order after a permutation."""
    return all(
        axes.index(i) < axes.index(k)
        for i, k in combinations(range(len(owners)), 2)
        if owners[i] == owners[k]
    )


def _transpose(axes: Sequence[int]) -> Steps:
    return () if [*axes] == sorted(axes) else (("transpose", tuple(axes)),)


def _permute(shape: Shape, axes: Sequence[int]) -> Shape:
    return tuple(shape[axis] for axis in axes)


def _usual(n: int) -> list[tuple[int, ...]]:
    """Returns the permutations that layouts of matrices and kernels differ in."""
    if n < 4:
        return [*permutations(range(n))]
    usual = [tuple(range(n))]
    for a, b in ((0, 1), (n - 2, n - 1)):  # the channels, first or last
        rest = [axis for axis in range(n) if axis not in (a, b)]
        usual += [(*rest, b, a), (*rest, a, b), (b, a, *rest), (a, b, *rest)]
    return usual
