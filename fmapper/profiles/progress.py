"""The progress bar of a profile, on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

from fmapper.switches import settings

_PATIENCE = 1.0  # seconds before the bar appears


class Progress:
    """Counts steps, and shows a bar after the first second.

    Args:
        steps: The number of steps.
        wanted: Whether to show the bar; None for a terminal only.
    """

    def __init__(self, steps: int, wanted: bool | None) -> None:
        self._steps, self._done = steps, 0
        self._forced = wanted is True
        default = settings.progress and sys.stderr.isatty()
        self._wanted = default if wanted is None else wanted
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, what: str) -> None:
        """Shows the name of the next step."""
        late = time.monotonic() - self._start > _PATIENCE
        if self._bar is None and self._wanted and late:
            self._show()
        if self._bar is not None:
            # Drawn here and not in a thread, which would run during measurements.
            self._bar.update(self._task, completed=self._done, description=what, refresh=True)

    def step(self) -> None:
        """Counts one step as done."""
        self._done += 1

    def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=Console(file=sys.stderr, force_terminal=self._forced or None),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=self._steps)
        self._bar.start()
