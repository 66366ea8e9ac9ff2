"""Lets one thread at a time record and compare models."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Turn:
    """A reentrant lock that is free in a forked child."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Makes a new lock: after a fork, the owner of the old one may be gone."""
        self.lock = threading.RLock()


_turn = _Turn()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn.renew)


def in_turn(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Serialises functions across threads by one reentrant lock."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _turn.lock:
            return function(*args, **kwargs)

    return wrapper
