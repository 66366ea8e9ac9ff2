"""The pieces of lazy arrays, against what reading them gives."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmapper.checkpoints.boxes import Box, box_shape, box_slices
from fmapper.checkpoints.lazy import LazyArray, Operation, concatenate, stack
from fmapper.sync.copies import view_of
from fmapper.sync.strided import Leaf, clip, clip_source, pieces_of, views


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
            kind = self.integer(0, 5)
            if kind == 0:
                array = stack([array, self.leaf([*array.shape])], self.integer(0, array.ndim))
            elif kind == 1:
                array = array.reshape(self.shape(array.size))
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
def test_pieces_are_what_reading_gives(data: Any) -> None:
    """Every element of a box is written once, whatever parts the source is in."""
    builder = Builder(data.draw)
    array = builder.build()
    values = {
        leaf.name: np.arange(leaf.size).reshape(leaf.shape) + 10_000 * at
        for at, leaf in enumerate(builder.leaves)
    }
    box = builder.box(array.shape)
    wanted = with_values(array, values).read(box)
    found = np.full(wanted.shape, -1)
    pieces = clip(pieces_of(array), array.shape, box)
    for leaf in builder.leaves:
        own = [piece for piece in pieces if piece.leaf is leaf]
        for part in parts(builder, leaf.shape):
            local = values[leaf.name][(*box_slices(part), ...)]
            local = np.asfortranarray(local) if builder.integer(0, 1) else local
            for piece in clip_source(own, leaf.shape, part):
                for froms, to in views(piece, box_shape(part), found.shape):
                    target = view_of(found, to)
                    assert (target == -1).all()
                    target[...] = view_of(local, froms)
    np.testing.assert_array_equal(found, wanted)


def parts(builder: Builder, shape: tuple[int, ...]) -> list[Box]:
    """Returns boxes into which a shape is divided along one dimension."""
    whole = tuple((0, size) for size in shape)
    if not shape:
        return [whole]
    axis = builder.integer(0, len(shape) - 1)
    middle = builder.integer(0, shape[axis])
    halves = ((0, middle), (middle, shape[axis]))
    return [(*whole[:axis], half, *whole[axis + 1 :]) for half in halves if half[0] < half[1]]


@pytest.mark.parametrize("count", [1, 64])
def test_stacked_layers_are_one_piece_each(count: int) -> None:
    leaves = [Leaf(str(n), (16, 8), np.dtype("float32")) for n in range(count)]
    pieces = pieces_of(stack([leaf.transpose() for leaf in leaves]))
    assert len(pieces) == count


def test_a_fused_projection_is_one_piece_per_part() -> None:
    leaf = Leaf("qkv", (4 * 3 * 8, 32), np.dtype("float32"))
    heads = leaf.reshape((4, 3, 8, 32)).transpose((1, 0, 2, 3)).reshape((3, 32, 32))
    assert len(pieces_of(heads)) == 1
