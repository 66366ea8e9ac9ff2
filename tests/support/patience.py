"""A bound for what must not hang: far above what it takes, far below what a hang takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 20.0


@contextmanager
def no_hang(seconds: float = SECONDS) -> Iterator[None]:
    """Fail where this thread computes for more than ``seconds`` in the body.

    It is no measure of speed: the time is this thread's own, so that neither another process nor
    another thread can spend it, and the bound is one that only work of another order reaches.
    """
    start = time.thread_time()
    yield
    assert time.thread_time() - start < seconds
