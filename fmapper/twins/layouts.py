"""The layouts that one array may have in two models, and which of them layers of libraries have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rule import OnEach, Rule

Shape: TypeAlias = tuple[int, ...]
Steps: TypeAlias = tuple[tuple[object, ...], ...]

# Where a layer has the outputs of a matrix or kernel; see `Models.weight_layouts`.
_OUT, _IN, _TABLE = "outputs first", "outputs last", "rows"
_MOST_AXES = 5


@dataclass(frozen=True, slots=True)
class Layout:
    """A change of layout as steps, each for a rule.

    Attributes:
        steps: `("transpose", axes)`, `("reshape", shape, shape before)`,
            `("interleave", groups, axis, back)`, `("blocks", order, axis)` or `("offset", value)`.
        certain: The classes of both layers say so, or nothing else fits.
    """

    steps: Steps = ()
    certain: bool = False

    def rules(self, names: Sequence[str]) -> Iterator[Rule]:
        """Yields the rules for arrays of these names."""
        for kind, *values in self.steps:
            if kind == "blocks":
                yield from _exchange(names, *values)  # type: ignore[arg-type]
                continue
            yield _rule(str(kind), tuple(names) if len(names) > 1 else names[0], values)

    def __str__(self) -> str:
        return ", ".join(f"{kind} {_say(values[0])}" for kind, *values in self.steps)


def _say(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _exchange(names: Sequence[str], order: tuple[int, ...], axis: int) -> Iterator[Rule]:
    """Yields the rules that put equal parts of arrays in another order."""
    from fmapper.checkpoints.rules.joining import Concatenate, Split

    for name in names:
        parts = [f"{name}.part{at}" for at in range(len(order))]
        yield Split(name, parts, axis)
        yield Concatenate([parts[at] for at in order], name, axis)


def _rule(kind: str, names: str | tuple[str, ...], values: list[object]) -> OnEach:
    from fmapper.checkpoints.rules.arithmetic import Offset
    from fmapper.checkpoints.rules.layout import Interleave, Reshape, Transpose

    if kind == "offset":
        return Offset(names, *values)  # type: ignore[arg-type]
    if kind == "transpose":
        return Transpose(names, values[0])  # type: ignore[arg-type]
    if kind == "reshape":
        return Reshape(names, *values)  # type: ignore[arg-type]
    return Interleave(names, *values)  # type: ignore[arg-type]


@cache
def layouts(shape: Shape, wanted: Shape, a: str = "", b: str = "") -> tuple[Layout, ...]:
    """Returns the layouts by which an array of a shape can become one of another, the best first.

    Args:
        shape: The shape.
        wanted: The wanted shape.
        a: Where the layer that has the shape has its outputs.
        b: The same of the layer that has the wanted shape.
    """
    if math.prod(shape) != math.prod(wanted) or max(len(shape), len(wanted)) > _MOST_AXES:
        return ()
    if len([n for n in shape if n != 1]) <= 1:
        return (Layout(_reshape(shape, wanted), certain=True),)
    known = _by_convention(a, b, shape, wanted)
    if known is not None:
        return (Layout(known, certain=True),)
    found: dict[object, Steps] = {}
    usual: dict[object, bool] = {}
    for steps in _options(shape, wanted):
        order, keeps = _trace(shape, steps)
        if found.setdefault(order, steps) is steps:
            usual[order] = keeps
    count = sum(usual.values())
    ranked = sorted(found, key=lambda order: not usual[order])
    return tuple(Layout(found[o], certain=count == 1 and usual[o]) for o in ranked)


def _by_convention(a: str, b: str, shape: Shape, wanted: Shape) -> Steps | None:
    if not a or not b or (_TABLE in (a, b) and a != b):
        return None
    if a == b:
        steps = _reshape(shape, wanted)
        return steps if shape == wanted or _is_regrouping(shape, wanted) else None
    if len(shape) == len(wanted):
        n = len(shape)
        axes = (*range(2, n), 1, 0) if a == _OUT else (n - 1, n - 2, *range(n - 2))
        turned = tuple(shape[axis] for axis in axes)
        return (("transpose", axes),) if turned == wanted else None
    if a == _OUT and len(shape) == 2:
        turned = shape[::-1]
        if _is_regrouping(turned, wanted):
            return (("transpose", (1, 0)), *_reshape(turned, wanted))
    if a == _IN and len(wanted) == 2:
        turned = wanted[::-1]
        if _is_regrouping(shape, turned):
            return (*_reshape(shape, turned), ("transpose", (1, 0)))
    return None


def _reshape(shape: Shape, wanted: Shape) -> Steps:
    return () if shape == wanted else (("reshape", wanted, shape),)


def _is_regrouping(shape: Shape, wanted: Shape) -> bool:
    """Returns whether a reshape splits or merges dimensions, but does not do both to any."""
    old, new = [n for n in shape if n != 1], [n for n in wanted if n != 1]
    i = j = 0
    while i < len(old) and j < len(new):
        first_i, first_j, before, after = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while before != after:
            if before < after and i < len(old):
                before, i = before * old[i], i + 1
            elif before > after and j < len(new):
                after, j = after * new[j], j + 1
            else:
                return False
        if i - first_i > 1 and j - first_j > 1:
            return False
    return i == len(old) and j == len(new)


def _options(shape: Shape, wanted: Shape) -> Iterator[Steps]:
    """Yields the steps from one shape to another: a permutation, before or after a reshape."""
    if len(shape) == len(wanted):
        usual = [axes for axes in _usual(len(shape)) if _permute(shape, axes) == wanted]
        every = (axes for axes in permutations(range(len(shape))))
        chosen = usual or [axes for axes in every if _permute(shape, axes) == wanted]
        for axes in chosen:
            yield () if axes == tuple(range(len(shape))) else (("transpose", axes),)
        if chosen:
            return
    for axes in permutations(range(len(shape))):
        turned = _permute(shape, axes)
        if _is_regrouping(turned, wanted):
            first = () if turned == shape and axes == tuple(range(len(shape))) else (
                ("transpose", axes),
            )  # fmt: skip
            yield (*first, *_reshape(turned, wanted))
    for axes in permutations(range(len(wanted))):
        before = tuple(wanted[axes.index(axis)] for axis in range(len(wanted)))
        if axes != tuple(range(len(wanted))) and _is_regrouping(shape, before):
            yield (*_reshape(shape, before), ("transpose", axes))


def _permute(shape: Shape, axes: Sequence[int]) -> Shape:
    return tuple(shape[axis] for axis in axes)


def _usual(n: int) -> list[tuple[int, ...]]:
    """Returns the permutations that layouts of matrices and kernels differ in."""
    if n < 4:
        return [*permutations(range(n))]
    space = range(2, n)
    return [
        tuple(range(n)),
        (*space, 1, 0),
        (*space, 0, 1),
        (n - 1, n - 2, *range(n - 2)),
        (n - 2, n - 1, *range(n - 2)),
        (1, 0, *space),
        (*range(n - 2), n - 1, n - 2),
    ]


def _trace(shape: Shape, steps: Steps) -> tuple[object, bool]:
    """Returns what identifies the order in which steps leave the elements, and if it is usual.

    It is where parts of a dimension, such as heads and what is in one, stay in their order.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    dims = [[(n, stride)] for n, stride in zip(shape, strides, strict=True)]
    for kind, *values in steps:
        if kind == "transpose":
            dims = [dims[axis] for axis in values[0]]  # type: ignore[attr-defined]
        else:
            dims = _regroup([factor for dim in dims for factor in dim], values[0])  # type: ignore[arg-type]
    flat = [factor for dim in dims for factor in dim if factor[0] != 1]
    joined: list[tuple[int, int]] = []
    for n, stride in flat:
        if joined and joined[-1][1] == n * stride:
            joined[-1] = (joined[-1][0] * n, stride)
        else:
            joined.append((n, stride))
    merged = [[stride for n, stride in dim if n != 1] for dim in dims]
    split = [
        [stride for _, stride in flat if low <= stride < low * n]
        for n, low in zip(shape, strides, strict=True)
    ]
    keeps = all(found == sorted(found, reverse=True) for found in (*merged, *split))
    return tuple(joined), keeps


def _regroup(factors: list[tuple[int, int]], shape: Shape) -> list[list[tuple[int, int]]]:
    """Distributes factors with their strides over the dimensions of a shape."""
    rest = [factor for factor in factors if factor[0] != 1][::-1]
    dims: list[list[tuple[int, int]]] = []
    for size in shape:
        dim: list[tuple[int, int]] = []
        left = size
        while left > 1:
            n, stride = rest.pop()
            if n > left:
                inner = n // left
                rest.append((inner, stride))
                n, stride = left, stride * inner
            dim.append((n, stride))
            left //= n
        dims.append(dim)
    return dims
