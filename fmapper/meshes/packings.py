"""Finds parameters that pack several arrays side by side, such as gate and up projections.

A product with such a parameter has several results side by side, which later calls cut apart. A
device with a contiguous part of the parameter would not compute the results that it needs. If
nothing before the cuts depends on the order of the results, the parameter may be stored in another
order, block by block with a part of each array, provided that the cuts account for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fmapper.backends.meshes import Packed
from fmapper.programs.program import Call


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a dimension that a call takes.

    Attributes:
        start: The index of its first element.
        part: The dimension of the part.
        call: The call.
        at: The position of the dimension in the operand, counted from the end; None in an inner
            graph.
    """

    start: int
    part: int
    call: Call
    at: int | None


@dataclass(frozen=True, slots=True)
class Cutting:
    """The arrays that a call cuts out of a packed one.

    Attributes:
        at: The dimension of its operand, counted from the end.
        sizes: The sizes of all packed arrays along it.
        chosen: The indices of those that it takes: one, or all.
    """

    at: int
    sizes: tuple[int, ...]
    chosen: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """Parameters that are packed alike, and the calls that unpack their products.

    Attributes:
        parameters: The packing of each parameter, by name.
        cuts: The cutting of each call, by name.
    """

    parameters: dict[str, Packed]
    cuts: dict[str, Cutting]


@dataclass(frozen=True, slots=True)
class Step:
    """A call with the dimensions of its operands and results, and those that it sums over."""

    call: Call
    operands: list[int]
    results: list[int]
    sums: list[int]


def find_packings(
    order: Callable[[int], int],
    sizes: Sequence[int | str],
    parameters: Mapping[str, Sequence[int]],
    cuts: Mapping[int, Sequence[Cut]],
    steps: Iterable[Step],
    fixed: Iterable[int],
) -> list[Packing]:
    """Returns the packings of a program.

    Args:
        order: Returns the representative of all dimensions with the same order of elements.
        sizes: The size of each dimension.
        parameters: The dimensions of each parameter.
        cuts: The cuts that cover a dimension completely, by dimension.
        steps: The calls.
        fixed: Dimensions whose order cannot be changed, such as those of inputs and outputs.
    """
    dims, owners, calls = defaultdict(list), defaultdict(list), defaultdict(list)
    wanted = {order(dim) for dim in cuts} - {order(dim) for dim in fixed}
    wanted -= {order(cut.part) for group in cuts.values() for cut in group}
    for dim in range(len(sizes)):
        dims[order(dim)].append(dim)
    for name, array_dims in parameters.items():
        for at, dim in enumerate(array_dims):
            owners[order(dim)].append((name, at, sizes[dim]))
    for step in steps:
        for root in {order(dim) for dim in (*step.operands, *step.results)} & wanted:
            calls[root].append(step)
    packings = []
    for root in sorted(wanted):
        own_cuts = {dim: cuts[dim] for dim in dims[root] if dim in cuts}
        shares = {tuple(_shares(group, sizes, dim)) for dim, group in own_cuts.items()}
        names = [name for name, _, _ in owners[root]]
        if not names or len(set(names)) < len(names) or len(shares) > 1:
            continue
        (share,) = shares
        units = [part * size for dim in dims[root] if isinstance(size := sizes[dim], int)
                 for part in share]  # fmt: skip
        is_whole = len(units) == len(share) * len(dims[root])
        if not is_whole or any(unit.denominator > 1 for unit in units):
            continue
        cutting = _cuts_by_call(own_cuts, sizes)
        if cutting is None or not all(_keeps(step, root, order, cutting) for step in calls[root]):
            continue
        limit = math.gcd(*(unit.numerator for unit in units))
        packed = {name: Packed(at, tuple(int(part * size) for part in share), limit)
                  for name, at, size in owners[root] if isinstance(size, int)}  # fmt: skip
        packings.append(Packing(packed, cutting))
    return packings


def _shares(cuts: Sequence[Cut], sizes: Sequence[int | str], dim: int) -> Iterable[Fraction]:
    """Yields the share that each array has of a dimension, in order."""
    for _, part in sorted({(cut.start, int(sizes[cut.part])) for cut in cuts}):
        yield Fraction(part, int(sizes[dim]))


def _cuts_by_call(
    cuts: Mapping[int, Sequence[Cut]], sizes: Sequence[int | str]
) -> dict[str, Cutting] | None:
    """Returns the cutting of each call; None if a call is in an inner graph."""
    cuttings: dict[str, Cutting] = {}
    for group in cuts.values():
        parts = sorted({(cut.start, int(sizes[cut.part])) for cut in group})
        for cut in group:
            if cut.at is None:
                return None
            earlier = cuttings.get(cut.call.name)
            chosen = (parts.index((cut.start, int(sizes[cut.part]))),)
            cuttings[cut.call.name] = Cutting(
                cut.at,
                tuple(size for _, size in parts),
                (earlier.chosen if earlier else ()) + chosen,
            )
    return cuttings


def _keeps(
    step: Step, root: int, order: Callable[[int], int], cutting: Mapping[str, Cutting]
) -> bool:
    """Returns whether a call has the same results if the order of its operands changes."""
    takes, gives, sums = (
        root in map(order, dims) for dims in (step.operands, step.results, step.sums)
    )
    if step.call.graphs() or not takes:
        return False
    return gives or sums or step.call.name in cutting
