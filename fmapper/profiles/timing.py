"""Robust timing: medians and quartiles of many rounds, within a time budget."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

clock: Callable[[], float] = time.perf_counter
"""A clock: returns the seconds since some fixed moment."""

_MOST = 200  # rounds; more do not improve a median


@dataclass(frozen=True, slots=True)
class Timing:
    """A number that was measured several times, or predicted.

    Attributes:
        median: The median of all rounds, or the likely value of a prediction.
        lower: The first quartile, or the lowest value of a prediction.
        upper: The third quartile, or the highest value of a prediction.
        n: The number of rounds; 0 for a prediction.
    """

    median: float
    lower: float
    upper: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Timing:
        """Returns the median and the quartiles of some values.

        Examples:
            >>> Timing.of([3.0, 1.0, 2.0])
            Timing(median=2.0, lower=1.5, upper=2.5, n=3)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, len(values))


@contextmanager
def no_collector() -> Iterator[None]:
    """Disables the garbage collector in the block, so that no run includes a collection."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def rounds(once: Callable[[], tuple[float, ...]], seconds: float) -> list[tuple[float, ...]]:
    """Repeats `once` until the time is up, at least once, and returns the results.

    The first round is discarded as a warm-up, unless it took all the time.
    """
    with no_collector():
        start = clock()
        first = once()
        if clock() - start >= seconds:
            return [first]
        results: list[tuple[float, ...]] = []
        while not results or (clock() - start < seconds and len(results) < _MOST):
            results.append(once())
        return results
