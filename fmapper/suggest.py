"""Suggests what was meant by a name that does not exist, for errors."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Suggests the closest known name, as a question; empty where none is close.

    Examples:
        >>> did_you_mean("Pytorch", ["torch", "jax"]), did_you_mean("tf", ["torch", "jax"])
        (" Did you mean 'torch'?", '')
    """
    import difflib  # slow to import, and seldom needed

    close = difflib.get_close_matches(given.lower(), list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
