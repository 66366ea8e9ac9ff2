"""Recording and replaying in turns: torch refuses to run a program while any thread records one."""

from __future__ import annotations

import threading


class Turns:
    """Any number of threads may replay at once, or one may record."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._replays = 0
        self._records = False

    def begin_replay(self) -> None:
        """Waits until nobody records."""
        with self._changed:
            while self._records:
                self._changed.wait()
            self._replays += 1

    def end_replay(self) -> None:
        """For each that has begun."""
        with self._changed:
            self._replays -= 1
            if not self._replays:
                self._changed.notify_all()

    def __enter__(self) -> None:
        with self._changed:
            while self._records or self._replays:
                self._changed.wait()
            self._records = True

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._records = False
            self._changed.notify_all()


turns = Turns()
