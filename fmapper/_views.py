"""Ties by view: arrays that are other objects on the same memory, such as `w` and `w.T`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fmapper._adapter import Adapter, Memory


@dataclass(frozen=True, slots=True)
class ViewTie:
    """Two arrays of a list share memory.

    Attributes:
        view: Index of the array that is to become a view.
        base: Index of the array that it is a view of.
        strides: Steps of the view, in elements.
        offset: Elements from the first of the base to the first of the view, or None where neither
            array covers the other, so that the tie cannot be kept.
    """

    view: int
    base: int
    strides: tuple[int, ...]
    offset: int | None


def find_view_ties(arrays: Sequence[Any], adapter: Adapter) -> list[ViewTie]:
    """The arrays that lie in the memory of another array of the list, each with its base."""
    spans: list[tuple[int, int, int, Memory]] = []
    for index, array in enumerate(arrays):
        memory = adapter.memory(array)
        if memory is not None:
            low, high = _span(memory, adapter.shape(array))
            spans.append((low, -high, index, memory))
    spans.sort(key=lambda span: span[:3])
    ties: list[ViewTie] = []
    base: tuple[int, int, int, Memory] | None = None
    for span in spans:
        low, minus_high, index, memory = span
        if base is None or low >= -base[1]:
            base = span
            continue
        own, other = arrays[index], arrays[base[2]]
        covered = (
            -minus_high <= -base[1]
            and adapter.dtype(own) == adapter.dtype(other)
            and _is_dense(base[3], adapter.shape(other))
            and (memory.start - base[3].start) % memory.itemsize == 0
        )
        offset = (memory.start - base[3].start) // memory.itemsize if covered else None
        ties.append(ViewTie(index, base[2], memory.strides, offset))
        if -minus_high > -base[1]:
            base = span
    return ties


def same_layout(old: Memory | None, new: Memory | None, shape: Sequence[int]) -> bool:
    """Whether a converted base has the strides of the old one, so that old offsets hold in it."""
    return (
        old is not None
        and new is not None
        and all(a == b for a, b, n in zip(old.strides, new.strides, shape, strict=True) if n > 1)
    )


def _span(memory: Memory, shape: Sequence[int]) -> tuple[int, int]:
    """The first address of an array and the first one after it."""
    steps = [stride * (n - 1) for stride, n in zip(memory.strides, shape, strict=True)]
    low = memory.start + memory.itemsize * sum(step for step in steps if step < 0)
    high = memory.start + memory.itemsize * (1 + sum(step for step in steps if step > 0))
    return low, high


def _is_dense(memory: Memory, shape: Sequence[int]) -> bool:
    """Whether every element between the first and the last is one of the array, in some order."""
    low, high = _span(memory, shape)
    ascending = all(stride > 0 for stride, n in zip(memory.strides, shape, strict=True) if n > 1)
    return ascending and high - low == memory.itemsize * math.prod(shape)
