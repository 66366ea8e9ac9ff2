"""Quotes text of a program in generated code, so that it is never executed."""

from __future__ import annotations

import re
import unicodedata

# Characters that end a line for Python or for readers, or that source code must not contain.
_NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NO_ATTRIBUTE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\"'\\\\]")


def on_one_line(text: str) -> str:
    """Escapes line breaks in a text for a comment."""
    return _NO_TEXT.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def as_attribute(name: str) -> str:
    """Replaces quotes in an attribute's name by `_`.

    Python normalises names in code, which turns a ligature into its letters.
    """
    return _NO_ATTRIBUTE.sub("_", unicodedata.normalize("NFKC", name))
