"""A lock for recordings: torch refuses to run a program while any thread records one."""

from __future__ import annotations

import threading


class Turns:
    """A lock that any number of replays share, or a single recording owns.

    Attributes:
        taken: Whether this thread holds the lock, and must not wait for it again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._replays = 0
        self._records = False
        self._here = threading.local()

    @property
    def taken(self) -> bool:
        """Whether this thread holds the lock."""
        return getattr(self._here, "taken", False)

    def begin_replay(self) -> None:
        """Waits until no thread records."""
        with self._changed:
            while self._records:
                self._changed.wait()
            self._replays += 1
        self._here.taken = True

    def end_replay(self) -> None:
        """Ends a replay."""
        self._here.taken = False
        with self._changed:
            self._replays -= 1
            if not self._replays:
                self._changed.notify_all()

    def __enter__(self) -> None:
        with self._changed:
            while self._records or self._replays:
                self._changed.wait()
            self._records = True
        self._here.taken = True

    def __exit__(self, *_: object) -> None:
        self._here.taken = False
        with self._changed:
            self._records = False
            self._changed.notify_all()


turns = Turns()
