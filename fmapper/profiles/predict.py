"""Predicts the time of a run on an accelerator that is not present."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fmapper.backends.compute import Counts
from fmapper.profiles.accelerator import Accelerator
from fmapper.profiles.timing import Timing

BEYOND = 256  # range of the search for a break-even, in multiples of the largest known batch size
# Kernels per counted kernel: a GPU has other algorithms, with fewer or more steps.
_KERNELS = (0.9, 1.0, 1.2)

Bound = str
"""`launch`, `transfer` or `compute`."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that cross the link in one run.

    Attributes:
        bytes_in: Bytes of the inputs.
        bytes_out: Bytes of the results.
        arrays_in: The number of input arrays.
        arrays_out: The number of result arrays.
        host_in: Seconds that the host needs to start the transfer of the inputs, without copies.
        host_out: Seconds that the host needs to start the transfer of the results.
    """

    bytes_in: float
    bytes_out: float
    arrays_in: int = 1
    arrays_out: int = 1
    host_in: float = 0.0
    host_out: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted seconds of a run on an accelerator, by activity.

    Attributes:
        transfer_in: To transfer the inputs to it.
        compute: To launch kernels, to compute and to wait for values.
        transfer_out: To transfer the results back.
        total: The sum of the three.
        bound: The activity that takes the largest part.
    """

    transfer_in: Timing
    compute: Timing
    transfer_out: Timing
    total: Timing
    bound: Bound


def predict(
    counts: Counts, traffic: Traffic, accelerator: Accelerator, dtype: str = "float32"
) -> Prediction:
    """Predicts the seconds of one run from its counts.

    Launching, computing and reading memory overlap: the slowest of the three counts. Copies over
    the link and waiting for values do not.
    """
    parts = [_parts(counts, traffic, accelerator, dtype, level) for level in range(3)]
    totals = [sum(part) for part in parts]
    transfer_in, compute, transfer_out = (
        Timing(likely, least, most, 0) for least, likely, most in zip(*parts, strict=True)
    )
    total = Timing(totals[1], totals[0], totals[2], 0)
    return Prediction(
        transfer_in,
        compute,
        transfer_out,
        total,
        _bound(counts, traffic, accelerator, compute.median, total.median),
    )


def _parts(
    counts: Counts, traffic: Traffic, accelerator: Accelerator, dtype: str, level: int
) -> tuple[float, float, float]:
    """Returns the times of input, compute and output: lowest (0), likely (1) or highest (2)."""
    share = 2 - level  # the highest share of a peak takes the least time
    link = accelerator.link * accelerator.link_share[share]
    copy = accelerator.copy[level]
    work = max(
        _launch_time(counts, accelerator, level, _KERNELS[level]),
        counts.flops / (accelerator.peak(dtype) * accelerator.compute_share[share]),
        counts.nbytes / (accelerator.memory * accelerator.memory_share[share]),
    )
    return (
        traffic.host_in + traffic.bytes_in / link + traffic.arrays_in * copy,
        work + counts.syncs * accelerator.sync[level],
        traffic.host_out + traffic.bytes_out / link + traffic.arrays_out * copy,
    )


def _bound(
    counts: Counts, traffic: Traffic, accelerator: Accelerator, compute: float, total: float
) -> Bound:
    """Returns the dominant part of the time: the fixed cost of a run, bytes, or operations."""
    link = accelerator.link * accelerator.link_share[1]
    moving = (traffic.bytes_in + traffic.bytes_out) / link
    waiting = counts.syncs * accelerator.sync[1]
    working = compute - waiting
    fixed = total - moving - working
    if _launch_time(counts, accelerator, 1) >= working:
        fixed, working = fixed + working, 0.0
    if fixed >= max(moving, working):
        return "launch"
    return "transfer" if moving >= working else "compute"


def _launch_time(
    counts: Counts, accelerator: Accelerator, level: int, kernels: float = 1.0
) -> float:
    launches = counts.launches * kernels
    if counts.compiled:
        return accelerator.compiled_call[level] + launches * accelerator.compiled_launch[level]
    return launches * accelerator.launch[level]


# --- over batch sizes ----------------------------------------------------------------------------


class Curve:
    """A piecewise linear function of the batch size, through known points and beyond them.

    With a single point it is proportional to the batch size, or constant.
    """

    def __init__(self, points: Mapping[int, float], *, constant: bool = False) -> None:
        self._at = sorted(points)
        self._values = [points[size] for size in self._at]
        self._constant = constant

    def __call__(self, size: float) -> float:
        """Returns the value at a batch size."""
        at, values = self._at, self._values
        if len(at) == 1:
            return values[0] if self._constant else values[0] * size / at[0]
        right = min(max(bisect_left(at, size), 1), len(at) - 1)
        left = right - 1
        slope = (values[right] - values[left]) / (at[right] - at[left])
        if not at[0] <= size <= at[-1]:  # noise must not make large batches cheaper than small ones
            slope = max(slope, (values[-1] - values[0]) / (at[-1] - at[0]), 0.0)
        base = right if size > at[-1] else left
        return max(values[base] + slope * (size - at[base]), 0.0)


def counts_between(counts: Mapping[int, Counts]) -> Callable[[float], Counts]:
    """Interpolates counts between batch sizes."""
    launches = Curve({size: count.launches for size, count in counts.items()}, constant=True)
    syncs = Curve({size: count.syncs for size, count in counts.items()}, constant=True)
    flops = Curve({size: count.flops for size, count in counts.items()})
    nbytes = Curve({size: count.nbytes for size, count in counts.items()})
    compiled = all(count.compiled for count in counts.values())

    def at(size: float) -> Counts:
        return Counts(launches(size), flops(size), nbytes(size), syncs(size), compiled)

    return at


def break_even(
    cost: Callable[[float], float], other: Callable[[float], float], least: int, most: int
) -> int | None:
    """Returns the batch size from which on `cost` is below `other`; None if it never is.

    From there up to `most`, it stays below. If it is not below at `most`, larger sizes are tried,
    up to `BEYOND` times that.

    Args:
        cost: Seconds at a batch size.
        other: Seconds of the alternative.
        least: The batch size at which the search begins.
        most: The largest batch size whose seconds are known.

    Examples:
        >>> break_even(lambda n: 100.0, lambda n: 2.0 * n, 1, 64)
        51
        >>> break_even(lambda n: 100.0, lambda n: 2.0 * n, 1, 8)
        51
    """
    if cost(most) < other(most):
        sizes = _ladder(least, most)[::-1]
        paying = next((i for i, size in enumerate(sizes) if cost(size) >= other(size)), None)
        if paying is None:
            return least
        low, high = sizes[paying], sizes[paying - 1]
    else:
        sizes = _ladder(most, most * BEYOND)
        paying = next((i for i, size in enumerate(sizes) if cost(size) < other(size)), None)
        if paying is None:
            return None
        low, high = sizes[paying - 1], sizes[paying]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if cost(middle) < other(middle) else (middle, high)
    return high


def _ladder(first: int, last: int) -> list[int]:
    """Returns sizes from first to last in steps of ten percent."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(max(int(sizes[-1] * 1.1), sizes[-1] + 1), last))
    return sizes
