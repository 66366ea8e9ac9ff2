"""Source files with a digest of their text, which shows whether they were edited."""

from __future__ import annotations

import hashlib
from pathlib import Path

_MARK = "# Written by fmapper, which does not overwrite it once it is edited: "
_LENGTH = 16  # hexadecimal digits of the digest: it guards against accidents, not against attacks


def with_stamp(text: str) -> str:
    """Appends a comment with a digest to source code."""
    return f"{text}\n{_MARK}{_digest(text)}\n"


def is_edited(path: Path) -> bool:
    """Returns whether a file exists and was edited since `with_stamp` wrote it.

    Raises:
        OSError: It cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    except UnicodeDecodeError:
        return True
    rest, mark, digest = text.rpartition(f"\n{_MARK}")
    return not mark or digest != f"{_digest(rest)}\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
