"""Measures the numbers of a data sheet on a device that is present."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

from fmapper.backends.arrays import Device
from fmapper.backends.compute import Compute
from fmapper.backends.discovery import get_adapter
from fmapper.backends.namespace import array_namespace
from fmapper.profiles import timing as _timing
from fmapper.profiles.accelerator import Accelerator, Range
from fmapper.profiles.bench import fetch, loader, mover_to
from fmapper.profiles.predict import Curve
from fmapper.profiles.timing import Timing, rounds

_SECONDS = 0.2  # seconds for each of the eight measurements
_LINK = 1 << 26  # bytes; copying them takes far longer than starting a copy
_CHAIN = (20, 120)  # small consecutive products, one kernel each


@functools.lru_cache(maxsize=16)
def calibrate(device: Device) -> Accelerator:
    """Measures what a device achieves, in less than five seconds; cached for the process.

    Matrix products give the operations per second, sums of large arrays the memory bandwidth,
    copies of a large and of a small array the link, and chains of small products the launch cost.
    The ranges are the quartiles.
    """
    adapter, move = get_adapter(device.backend, Compute), mover_to(device)
    import numpy as np  # the host arrays that are moved

    on_host = device.kind == "cpu"
    edge = 512 if on_host else 4096
    large = np.zeros(_LINK // 4, np.float32)
    small = np.zeros(1, np.float32)

    def time(run: Callable[..., Any], *inputs: Any) -> Timing:
        def once() -> tuple[float]:
            start = _timing.clock()
            adapter.wait(device, run(*inputs))
            return (_timing.clock() - start,)

        once()
        return Timing.of([seconds for (seconds,) in rounds(once, _SECONDS)])

    def rate(amount: float, timing: Timing) -> tuple[float, Range]:
        """Returns a rate per second: lowest, likely and highest."""
        median = timing.median
        return amount / median, (median / timing.upper, 1.0, median / timing.lower)

    flops: dict[str, float] = {}
    share: Range = (1.0, 1.0, 1.0)
    for dtype in ("float32", "bfloat16"):
        square = move(np.ones((edge, edge), np.float32), dtype=dtype)
        run = adapter.runner(_product, square, compile=None)
        flops[dtype], achieved = rate(2.0 * edge**3, time(run, square))
        share = achieved if dtype == "float32" else share
    flops["float16"] = flops["bfloat16"]

    array = move(large)
    doubled = time(adapter.runner(_sum, array, compile=None), array)
    memory, memory_share = rate(2.0 * _LINK, doubled)

    copy = time(loader(device, [small]))
    link, link_share = rate(_LINK, time(loader(device, [large])))
    tiny = move(np.full((8, 8), 0.1, np.float32))
    added = adapter.runner(_sum, tiny, compile=None)

    def read() -> None:
        fetch(device, [added(tiny)])

    # The time to wait for a value, without the time to compute it.
    alone = time(added, tiny).median
    back = time(read)
    sync = tuple(max(x - alone, 0.0) for x in (back.lower, back.median, back.upper))

    chains = {}
    for length in _CHAIN:
        run = adapter.runner(functools.partial(_chain, length), tiny, compile=None)
        chains[length] = time(run, tiny)
    per_launch = tuple(
        max((getattr(chains[_CHAIN[1]], name) - getattr(chains[_CHAIN[0]], name)), 1e-9)
        / (_CHAIN[1] - _CHAIN[0])
        for name in ("lower", "median", "upper")
    )
    launch = (min(per_launch), statistics.median(per_launch), max(per_launch))
    start = max(Curve({k: v.median for k, v in chains.items()})(0), 0.0)
    name = adapter.device_info(device).name or str(device)
    costs = {
        "launch": launch,
        "compiled_launch": launch,
        "compiled_call": (0.5 * start, start, 2 * start),
        "copy": (copy.lower, copy.median, copy.upper),
        "sync": sync,
    }
    return Accelerator(
        f"{name}, measured here",
        flops,
        memory,
        link,
        f"measured on {device}",
        share,
        memory_share,
        link_share,
        **costs,
    )


def _product(left: Any, right: Any) -> Any:
    return left @ right


def _sum(left: Any, right: Any) -> Any:
    return array_namespace(left).add(left, right)


def _chain(length: int, weight: Any, x: Any) -> Any:
    for _ in range(length):
        x = x @ weight
    return x
