"""Interleaved timing: every call in every round, so that the moods of the machine cancel."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

Timings = dict[str, list[float]]


@dataclass(frozen=True)
class Prepared:
    """A call that needs an argument of its own every time, made while the clock stands still."""

    prepare: Callable[[], object]
    call: Callable[[object], object]


Call = Callable[[], object] | Prepared


def interleave(
    calls: Mapping[str, Call],
    rounds: int,
    *,
    sample: float = 0.004,
    once: bool = False,
    budget: float = math.inf,
    keep_gc: bool = False,
    seed: int = 0,
    clock: Callable[[], float] = perf_counter,
) -> Timings:
    """Time every call once per round, the order shuffled each round.

    A call is repeated until a sample lasts long enough to time; freeing its result is part of it.

    Args:
        calls: what to time, by name.
        rounds: how many samples to take of each.
        sample: the shortest sample, in seconds.
        once: a sample is one call, and its result is freed after the clock has stopped: for calls
            that take long and make a lot. They are not warmed up either.
        budget: begin no further round after so many seconds, though never fewer than two.
        keep_gc: leave the cyclic garbage collector on while timing.
        seed: of the shuffle.
        clock: what is read before and after; where a machine is loaded, the time of the process.

    Returns:
        Seconds per call: one value per name and round done, in the order of the rounds.
    """
    repeats = {name: 1 if once else _repeats(call, sample, clock) for name, call in calls.items()}
    order = list(calls)
    timings: Timings = {name: [] for name in calls}
    shuffle = random.Random(seed).shuffle
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # so that the collection between two rounds sees only what the calls left behind
    begun = perf_counter()
    try:
        for done in range(rounds):
            if done >= 2 and perf_counter() - begun > budget:
                break
            shuffle(order)
            gc.collect()
            if not keep_gc:
                gc.disable()
            for name in order:
                call = calls[name]
                seconds = _time_once(call, clock) if once else _time(call, repeats[name], clock)
                timings[name].append(seconds)
            gc.enable()
    finally:
        gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()
    return timings


def paired(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of ours / theirs, each quotient taken within one round.

    Returns:
        The median first, then the first and the third quartile.
    """
    quotients = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(quotients) == 1:
        return quotients[0], quotients[0], quotients[0]
    low, middle, high = quantiles(quotients, n=4, method="inclusive")
    return middle, low, high


def _repeats(call: Call, sample: float, clock: Callable[[], float]) -> int:
    """Say how often to repeat a call in one sample; warms the call up on the way."""
    once = median(_time(call, 1, clock) for _ in range(3))
    return max(1, math.ceil(sample / once))


def _time(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds that one of so many calls takes."""
    if isinstance(call, Prepared):
        arguments, do = [call.prepare() for _ in range(repeats)], call.call
        start = clock()
        for argument in arguments:
            do(argument)
        return (clock() - start) / repeats
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def _time_once(call: Call, clock: Callable[[], float]) -> float:
    """Return the seconds that one call takes, without the time to free what it returns."""
    arguments = (call.prepare(),) if isinstance(call, Prepared) else ()
    do = call.call if isinstance(call, Prepared) else call
    start = clock()
    result = do(*arguments)
    seconds = clock() - start
    del result
    return seconds
