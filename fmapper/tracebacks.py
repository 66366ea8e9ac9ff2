"""Short tracebacks: the frames of the user, and the function of fmapper that was called.

What is cut is what nobody can act on: how fmapper and the frameworks came to an error that says by
itself what happened, where and what to write. An error of the user's own code keeps where it was
raised. `fmapper.settings.full_tracebacks` shows everything.
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
"""The packages that adapters are for: they are not shown on the way to an error of fmapper."""


def short_traceback(function: F) -> F:
    """Shortens the tracebacks of errors that a function raises, without a frame of its own."""

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

    What it comes from is left out where its message says that too, and else keeps the frames of
    the user alone.
    """
    if settings.full_tracebacks:
        return
    tb = error.__traceback__
    if not isinstance(error, FmapperError):
        error.__traceback__ = _without(tb, keep_last=True)
        return
    error.__traceback__ = _without(tb, hidden=frameworks)
    told = str(error.__cause__ or "").strip().partition("\n")[0]
    if told and told in str(error):
        error.__cause__ = None
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _of_user(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def _frames(tb: TracebackType | None) -> list[tuple[TracebackType, str]]:
    """Returns the entries of a traceback, outermost first, each with its package."""
    found = []
    while tb is not None:
        name = tb.tb_frame.f_globals.get("__name__")
        found.append((tb, name if isinstance(name, str) else ""))
        tb = tb.tb_next
    return found


def _without(
    tb: TracebackType | None, *, hidden: Collection[str] = (), keep_last: bool = False
) -> TracebackType | None:
    """Returns a traceback with only those frames of fmapper that a user has called."""
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
    """Returns a traceback that begins with the frames of the user.

    That was caught outside of fmapper: it is not where the error comes from.
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
