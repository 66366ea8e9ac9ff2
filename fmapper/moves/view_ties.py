"""Ties by view: different arrays on the same memory, such as `w` and `w.T`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fmapper.backends.arrays import Arrays, Memory


@dataclass(frozen=True, slots=True)
class ViewTie:
    """Two arrays of a list that share memory.

    Attributes:
        view: Index of the array that becomes a view.
        base: Index of the array that it is a view of.
    """

    view: int
    base: int


@dataclass(frozen=True, slots=True)
class _Span:
    index: int
    low: int
    high: int
    memory: Memory
    shape: tuple[int, ...]
    owner: Arrays

    @property
    def rank_as_base(self) -> tuple[bool, bool, int, int]:
        """Ranks arrays as bases, best first: plain, without negative strides, large, early."""
        backwards = any(stride < 0 for stride in self.memory.strides)
        return not self.memory.plain, backwards, -math.prod(self.shape), self.index


def find_view_ties(arrays: Sequence[Any], adapter: Arrays | None = None) -> list[ViewTie]:
    """Finds arrays that share elements with others of the list, and a base for each.

    Without an adapter they may be of several frameworks. Of two frameworks, those with overlapping
    spans count as sharing elements.
    """
    from fmapper.backends.discovery import owner_of

    spans: list[_Span] = []
    for index, array in enumerate(arrays):
        owner = adapter or owner_of(array)
        memory = owner.memory(array)
        if memory is not None:
            shape = owner.shape(array)
            spans.append(_Span(index, *_bounds(memory, shape), memory, shape, owner))
    spans.sort(key=lambda span: span.low)
    ties: list[ViewTie] = []
    cluster: list[_Span] = []
    reach = 0
    for span in spans:
        if cluster and span.low >= reach:
            ties += _ties_among(cluster, arrays)
            cluster = []
        cluster.append(span)
        reach = max(reach, span.high)
    return ties + _ties_among(cluster, arrays)


def ties_of(arrays: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yields the indices of arrays of any frameworks that are one or have elements in common."""
    from fmapper.backends.discovery import owner_of

    first: dict[int, int] = {}
    same = ((at, first.setdefault(id(array), at)) for at, array in enumerate(arrays))
    yield from (pair for pair in same if pair[0] != pair[1])
    adapters = {owner_of(array) for array in {type(array): array for array in arrays}.values()}
    if len(adapters) > 1 or any(adapter.may_share_memory(arrays) for adapter in adapters):
        yield from ((tie.view, tie.base) for tie in find_view_ties(arrays))


def has_overlap(array: Any) -> bool:
    """Returns whether elements of an array may lie in one place, as in one that was expanded."""
    from fmapper.backends.discovery import owner_of

    memory, shape = owner_of(array).memory(array), owner_of(array).shape(array)
    reach = 0  # steps to the last of the elements within one step of the next dimension
    pairs = () if memory is None else zip(map(abs, memory.strides), shape, strict=True)
    for step, size in sorted(pair for pair in pairs if pair[1] > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def addresses(arrays: Sequence[Any]) -> list[Any]:
    """Returns a list that stays equal while all arrays lie where they are."""
    from fmapper.backends.discovery import owner_of

    owners = {owner_of(array) for array in {type(array): array for array in arrays}.values()}
    groups = [[x for x in arrays if len(owners) == 1 or owner_of(x) is each] for each in owners]
    return [
        at for owner, group in zip(owners, groups, strict=True) for at in owner.addresses(group)
    ]


def _ties_among(cluster: list[_Span], arrays: Sequence[Any]) -> list[ViewTie]:
    """Finds the ties among arrays with overlapping spans, whose elements may still be disjoint."""
    ties: list[ViewTie] = []
    bases: list[_Span] = []
    for span in sorted(cluster, key=lambda span: span.rank_as_base) if len(cluster) > 1 else ():
        array = arrays[span.index]
        base = next(
            (
                base
                for base in bases
                if span.low < base.high
                and base.low < span.high
                and (
                    span.owner is not base.owner
                    or span.owner.shares_elements(array, arrays[base.index])
                )
            ),
            None,
        )
        if base is None:
            bases.append(span)
        else:
            ties.append(ViewTie(span.index, base.index))
    return ties


def remake(view: Any, base: Any, new_base: Any, source: Arrays, target: Arrays) -> Any | None:
    """Returns the view of `new_base` that corresponds to `view` of `base`; None if impossible.

    Args:
        view: The view.
        base: The array that it is a view of.
        new_base: The replacement of `base`, of the same dtype.
        source: The adapter of the old arrays.
        target: The adapter of the new base.
    """
    old, old_base, memory = source.memory(view), source.memory(base), target.memory(new_base)
    shape = source.shape(view)
    if target.frozen and old is not None and old == old_base and shape == source.shape(base):
        return new_base  # the whole base, as in a state dict of tied weights
    if old is None or old_base is None or memory is None:
        return None
    place = transplant(old, shape, old_base, source.shape(base), memory)
    if place is None:
        return None
    try:
        return target.view(new_base, shape, *place, view)
    except TypeError:  # the target has no such views
        return None


def transplant(
    view: Memory,
    view_shape: Sequence[int],
    base: Memory,
    base_shape: Sequence[int],
    new_base: Memory,
) -> tuple[list[int], int] | None:
    """Translates the strides and offset of a view of `base` to `new_base`.

    Returns:
        Its strides and its offset from the first element of the new base, in elements; None if the
        view does not consist of whole elements of the base, or the new base cannot have such
        strides.
    """
    if not (view.plain and base.plain) or view.itemsize != base.itemsize:
        return None
    offset, rest = divmod(view.start - base.start, base.itemsize)
    if rest:
        return None
    moving = [d for d, n in enumerate(base_shape) if n > 1]
    if all(base.strides[d] == new_base.strides[d] for d in moving) and _is_dense(base, base_shape):
        low, high = _bounds(view, view_shape)
        base_low, base_high = _bounds(base, base_shape)
        return (list(view.strides), offset) if base_low <= low and high <= base_high else None
    # Otherwise each index of the view must step along one dimension of the base, in whole steps.
    order = sorted(moving, key=lambda d: -base.strides[d])
    if any(base.strides[d] <= 0 for d in order):
        return None
    index = {}
    for d in order:
        index[d], offset = divmod(offset, base.strides[d])
        if not 0 <= index[d] < base_shape[d]:
            return None
    if offset:
        return None
    strides = []
    reached = dict(index)
    for stride, n in zip(view.strides, view_shape, strict=True):
        if n == 1 or stride == 0:
            strides.append(0)
            continue
        along = next((d for d in order if stride % base.strides[d] == 0), None)
        if along is None:
            return None
        steps = stride // base.strides[along]
        reached[along] += steps * (n - 1)
        if not 0 <= reached[along] < base_shape[along]:
            return None
        strides.append(steps * new_base.strides[along])
    return strides, sum(index[d] * new_base.strides[d] for d in order)


def _bounds(memory: Memory, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the address range of an array."""
    steps = [stride * (n - 1) for stride, n in zip(memory.strides, shape, strict=True)]
    low = memory.start + memory.itemsize * sum(step for step in steps if step < 0)
    high = memory.start + memory.itemsize * (1 + sum(step for step in steps if step > 0))
    return low, high


def _is_dense(memory: Memory, shape: Sequence[int]) -> bool:
    """Returns whether the array has no gaps between its first and last element."""
    low, high = _bounds(memory, shape)
    ascending = all(stride > 0 for stride, n in zip(memory.strides, shape, strict=True) if n > 1)
    return ascending and high - low == memory.itemsize * math.prod(shape)
