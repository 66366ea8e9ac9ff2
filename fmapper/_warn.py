"""Warnings that point at the line of the user's that caused them."""

from __future__ import annotations

import sys
import warnings

from fmapper._errors import FmapperWarning


def warn(message: str, category: type[FmapperWarning]) -> None:
    """Warns at the innermost frame that is not one of fmapper's own."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("fmapper", "fmapper_adapters")
