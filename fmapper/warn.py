"""Warnings that point at the line of the user's code that caused them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Warned = tuple[str, type[Warning]]

without_line: Callable[[], AbstractContextManager[None]] = nullcontext
"""Hides the progress line during a block; `fmapper.progress` replaces this."""

_kept: ContextVar[list[Warned] | None] = ContextVar("fmapper_kept_warnings", default=None)


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the innermost frame outside of fmapper."""
    kept = _kept.get()
    if kept is not None:
        kept.append((message, category))
        return
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    with without_line():
        warnings.warn(message, category, stacklevel=level)


@contextmanager
def keeping_warnings() -> Iterator[list[Warned]]:
    """Collects the warnings of this block, since a background thread has no user frame.

    `warnings.catch_warnings` would catch those of all other threads too.
    """
    kept: list[Warned] = []
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("fmapper", "fmapper_adapters")
