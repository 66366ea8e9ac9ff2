"""The user's settings: what fmapper shows, and which files it accepts."""

from __future__ import annotations

import os


class Settings:
    """Settings for what fmapper shows besides results, and for which files it accepts.

    Attributes:
        bounds: Whether to refuse files with more names, numbers and texts than genuine ones have,
            which would take seconds and much memory to read. `FMAPPER_BOUNDS=0` switches it off,
            for files that you trust.
        progress: Whether to show the progress of work that takes more than two seconds, in one line
            on stderr that is erased at the end, if stderr is a terminal, and in notebooks.
            `FMAPPER_PROGRESS=0` in the environment switches it off.
        full_tracebacks: Whether the tracebacks of errors show every frame, those inside of fmapper
            too, and not only those of the user and the function of fmapper that was called.
            `FMAPPER_FULL_TRACEBACKS=1` switches it on.
    """

    __slots__ = ("bounds", "full_tracebacks", "progress")

    bounds: bool
    progress: bool
    full_tracebacks: bool

    def __init__(self) -> None:
        self.bounds = _is_set("FMAPPER_BOUNDS", True)
        self.progress = _is_set("FMAPPER_PROGRESS", True)
        self.full_tracebacks = _is_set("FMAPPER_FULL_TRACEBACKS", False)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)
        return f"Settings({shown})"


def _is_set(variable: str, default: bool) -> bool:
    text = os.environ.get(variable, "").strip().lower()
    return default if not text else text not in ("0", "false", "no", "off")


settings = Settings()
"""What fmapper shows besides results, and which files it accepts.

Work that takes more than two seconds (recording, lowering, comparing, moving gigabytes) says what
it does in one line on stderr, where that is a terminal, or below the cell of a notebook; the line
is gone at the end. `settings.progress = False`, or `FMAPPER_PROGRESS=0` in the environment, is
quiet.

Tracebacks show the frames of the user and the function of fmapper that was called.
`settings.full_tracebacks = True`, or `FMAPPER_FULL_TRACEBACKS=1`, shows those inside, too.

A file with more names, numbers and texts than genuine ones have is refused, since anybody may have
written it. `settings.bounds = False`, or `FMAPPER_BOUNDS=0`, accepts any number of them.

Examples:
    >>> import fmapper
    >>> fmapper.settings
    Settings(bounds=True, full_tracebacks=..., progress=True)
"""
