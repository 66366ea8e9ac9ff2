"""Short tracebacks: the frames of the user, and the function of fmapper that was called.

Frames inside fmapper and the frameworks are cut: nobody can act on them, and the message says what
happened, where, and what to write. An error in the user's own code keeps the frame that raised it.
`fmapper.settings.full_tracebacks` shows everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, TypeVar, cast

from fmapper.errors import FmapperError
from fmapper.switches import settings

F = TypeVar("F", bound=Callable[..., Any])

_OURS = {"fmapper", "fmapper_adapters"}
frameworks: set[str] = set()
"""The packages that have adapters: their frames are hidden in the traceback of an fmapper error."""


def short_traceback(function: F) -> F:
    """Decorates a function to shorten the tracebacks of its errors, without adding a frame."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            shorten_traceback(error)
            raise

    return cast(F, call)


def shorten_traceback(error: BaseException) -> None:
    """Cuts internal frames out of the traceback of an error.

    The cause of an fmapper error is dropped if the message repeats it; otherwise only the user's
    frames of the cause are kept.
    """
    if settings.full_tracebacks:
        return
    tb = error.__traceback__
    if not isinstance(error, FmapperError):
        error.__traceback__ = _without(tb, keep_last=True)
        return
    error.__traceback__ = _without(tb, hidden=frameworks)
    reason = str(error.__cause__ or "").strip().partition("\n")[0]
    if reason and reason in str(error):
        error.__cause__ = None
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _of_user(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def _frames(tb: TracebackType | None) -> list[tuple[TracebackType, str]]:
    """Returns the entries of a traceback, outermost first, each with its package."""
    entries = []
    while tb is not None:
        name = tb.tb_frame.f_globals.get("__name__")
        entries.append((tb, name if isinstance(name, str) else ""))
        tb = tb.tb_next
    return entries


def _without(
    tb: TracebackType | None, *, hidden: Collection[str] = (), keep_last: bool = False
) -> TracebackType | None:
    """Returns a traceback without the frames of fmapper that the user did not call directly."""
    kept = []
    inside = False
    frames = _frames(tb)
    for at, (entry, name) in enumerate(frames):
        package = name.partition(".")[0]
        last = keep_last and at == len(frames) - 1
        if package in _OURS:
            if name != __name__ and (last or not inside):
                kept.append(entry)
                inside = True
        elif package not in hidden or last:
            kept.append(entry)
            inside = False
    return _link(kept)


def _of_user(tb: TracebackType | None) -> TracebackType | None:
    """Removes internal frames from a traceback that begins in one.

    A traceback that begins in the user's code is kept, because that code caught the error.
    """
    frames = [(entry, name.partition(".")[0]) for entry, name in _frames(tb)]
    internal = _OURS | frameworks
    if not frames or frames[0][1] not in internal:
        return tb
    return _link([entry for entry, package in frames if package not in internal])


def _link(entries: list[TracebackType]) -> TracebackType | None:
    following = None
    for entry in reversed(entries):
        entry.tb_next = following
        following = entry
    return following
