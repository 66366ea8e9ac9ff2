"""Which boxes of its inputs a lazy array needs, against what reading all of them gives."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fmapper.checkpoints.boxes import Box, box_shape, overlap
from fmapper.checkpoints.lazy import LazyArray, Operation, add, concatenate, stack
from fmapper.sync.inputs import Input, Leaf, leaves_of, needs, with_inputs, with_steps


class Builder:
    """Makes a lazy array of leaves by random operations."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.leaves: list[Leaf] = []

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def leaf(self, shape: list[int]) -> Leaf:
        self.leaves.append(Leaf(str(len(self.leaves)), shape, np.dtype("int64")))
        return self.leaves[-1]

    def build(self) -> LazyArray:
        array: LazyArray = self.leaf([self.integer(1, 6) for _ in range(self.integer(0, 3))])
        for _ in range(self.integer(0, 6)):
            kind = self.integer(0, 6)
            if kind == 0:
                array = stack([array, self.leaf([*array.shape])], self.integer(0, array.ndim))
            elif kind == 1:
                array = array.reshape(self.shape(array.size))
            elif kind == 6:
                array = array.plus(self.integer(1, 3)).times(2)
            elif array.ndim and kind == 2:
                array = array.transpose(self.draw(st.permutations(range(array.ndim))))
            elif array.ndim and kind == 3:
                array = array.part(self.box(array.shape))
            elif array.ndim and kind == 4:
                axis, shape = self.integer(0, array.ndim - 1), [*array.shape]
                shape[axis] = self.integer(1, 4)
                array = concatenate([array, self.leaf(shape)], axis)
            elif array.ndim:
                sizes = [n for n in range(1, array.shape[0] + 1) if not array.shape[0] % n]
                array = array.interleave(self.draw(st.sampled_from(sizes)))
        return array

    def shape(self, size: int) -> list[int]:
        shape = []
        while size > 1 and len(shape) < 4:
            shape.append(
                self.draw(st.sampled_from([n for n in range(1, size + 1) if not size % n]))
            )
            size //= shape[-1]
        return [*shape, size]

    def box(self, shape: tuple[int, ...]) -> Box:
        starts = [self.integer(0, size - 1) for size in shape]
        return tuple(
            (start, self.integer(start + 1, size))
            for start, size in zip(starts, shape, strict=True)
        )


def with_values(array: LazyArray, values: dict[str, Any]) -> LazyArray:
    if isinstance(array, Leaf):
        return LazyArray.of(values[array.name])
    assert isinstance(array, Operation)
    new = copy.copy(array)
    new.operands = tuple(with_values(operand, values) for operand in array.operands)
    return new


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_a_box_needs_is_enough_and_no_more(data: Any) -> None:
    """Whatever parts the source is in; no element is sent twice."""
    builder = Builder(data.draw)
    array = builder.build()
    values = {
        leaf.name: np.arange(leaf.size).reshape(leaf.shape) + 10_000 * at
        for at, leaf in enumerate(builder.leaves)
    }
    box = builder.box(array.shape)
    wanted = with_values(array, values).read(box)
    made = with_inputs(array, {})
    sent = 0
    for leaf, inner in [*needs(made, box)]:
        changed = with_steps(LazyArray.of(values[leaf.name]), leaf.steps)
        for part in parts(builder, leaf.shape):
            common = overlap(part, inner)
            if common is not None:
                sent += math.prod(box_shape(common))
                leaf.parts[common] = changed.part(common)
    assert sent == math.prod(box_shape(box))
    np.testing.assert_array_equal(made.read(box), wanted)
    out = np.zeros(wanted.shape[::-1], wanted.dtype).T
    np.testing.assert_array_equal(made.read(box, out), wanted)


def parts(builder: Builder, shape: tuple[int, ...]) -> list[Box]:
    """Returns boxes into which a shape is divided along one dimension."""
    whole = tuple((0, size) for size in shape)
    if not shape:
        return [whole]
    axis = builder.integer(0, len(shape) - 1)
    middle = builder.integer(0, shape[axis])
    halves = ((0, middle), (middle, shape[axis]))
    return [(*whole[:axis], half, *whole[axis + 1 :]) for half in halves if half[0] < half[1]]


def test_equal_inputs_are_one() -> None:
    leaf = Leaf("w", (4, 2), np.dtype("float32"))
    inputs: dict[Hashable, Input] = {}
    arrays = [with_inputs(x, inputs) for x in (leaf, leaf.transpose(), leaf.plus(1.0))]
    assert arrays[0] is arrays[1].operands[0]  # type: ignore[attr-defined]
    assert len(inputs) == 2


def test_a_cast_is_done_before_elements_are_moved_and_added() -> None:
    first, second = (Leaf(name, (4, 2), np.dtype("float32")) for name in "ab")
    moved = stack([first.transpose(), second.transpose()]).astype("bfloat16")
    assert {x.dtype.name for x in leaves_of(with_inputs(moved, {}))} == {"bfloat16"}
    total = add([first, second]).astype("bfloat16")
    assert {x.dtype.name for x in leaves_of(with_inputs(total, {}))} == {"float32"}


def test_a_part_of_a_fused_projection_is_a_box_of_each() -> None:
    leaf = Leaf("qkv", (3 * 4 * 8, 32), np.dtype("float32"))
    heads = leaf.reshape((3, 4, 8, 32)).transpose((1, 0, 2, 3)).reshape((4, 24, 32))
    boxes = [box for _, box in needs(with_inputs(heads, {}), ((1, 3), (0, 24), (0, 32)))]
    assert sorted(boxes) == [((32 * n + 8, 32 * n + 24), (0, 32)) for n in range(3)]
