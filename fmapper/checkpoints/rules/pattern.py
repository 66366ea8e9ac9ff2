"""Names with captures: `layers.{i}.attn.{rest...}`.

A pattern matches a whole name. In it stand

    {name}          one part of the name: anything without a dot
    {name...}       one part or more, with the dots between them
    {name:0-31}     a number from 0 to 31
    {name:q|k|v}    one of these words
    *               anything, or nothing; what it has matched has no name

and a backslash before a brace or star that is meant. A capture that stands twice matches the same
text twice. There is no backtracking: the time is in proportion to the lengths of pattern and name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fmapper.errors import CheckpointError

_TOKEN = re.compile(r"\\(.)|\{([^{}]*)\}|(\*)|([{}\\])|([^\\{}*]+)", re.DOTALL)
_CAPTURE = re.compile(r"(\w+)(?:(\.\.\.)|:(\d{1,9})-(\d{1,9})|:([^:{}]+))?", re.ASCII)
_MOST_ITEMS = 64
_LONGEST = 4096  # characters of a pattern; a name may have 1024


@dataclass(frozen=True)
class Capture:
    """A variable part of a pattern.

    Attributes:
        name: Its name; empty for `*`.
        many: Whether the text may have dots.
        words: The texts that are allowed; any if empty.
        numbers: The first and last number that is allowed, if numbers are.
    """

    name: str
    many: bool = False
    words: tuple[str, ...] = ()
    numbers: tuple[int, int] | None = None

    def starts(self, text: str, ends: set[int]) -> set[int]:
        """Returns the starts from which this can end at one of the given positions."""
        if not self.name:
            return set(range(max(ends) + 1))
        if self.many:
            return set(range(max(ends)))
        if self.words:
            return {
                end - len(word) for end in ends for word in self.words if text[:end].endswith(word)
            }
        found: set[int] = set()
        for end in sorted(ends, reverse=True):
            start = end - 1
            while start >= 0 and start not in found and self._has(text[start]):
                found.add(start)
                start -= 1
        if self.numbers:
            found = {start for start in found if self._is_number(text, start, ends)}
        return found

    def _is_number(self, text: str, start: int, ends: set[int]) -> bool:
        stops = range(start + 1, start + 10)
        return any(stop in ends and self.accepts(text[start:stop]) for stop in stops)

    def _has(self, character: str) -> bool:
        return character != "." and (not self.numbers or character in "0123456789")

    def accepts(self, text: str) -> bool:
        """Returns whether this may match a text."""
        if not self.name:
            return True
        if self.words:
            return text in self.words
        if self.numbers:
            first, last = self.numbers
            plain = len(text) < 10 and text.isascii() and text.isdigit()
            return plain and str(int(text)) == text and first <= int(text) <= last
        return bool(text) and (self.many or "." not in text)


Item: TypeAlias = str | Capture


class Pattern:
    """A pattern for names; see the module.

    Examples:
        >>> Pattern("layers.{i}.{rest...}").match("layers.3.attn.q.weight")
        {'i': '3', 'rest': 'attn.q.weight'}
        >>> Pattern("blocks.{i}.{rest...}").format({"i": "3", "rest": "attn.q.weight"})
        'blocks.3.attn.q.weight'

    Raises:
        CheckpointError: The text is not a pattern.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.items = _parse(text)
        self.captures = list(
            dict.fromkeys(item.name for item in self.items if isinstance(item, Capture))
        )
        self._head = self.items[0] if self.items and isinstance(self.items[0], str) else ""
        self._tail = self.items[-1] if self.items and isinstance(self.items[-1], str) else ""

    def __repr__(self) -> str:
        """Returns the text."""
        return repr(self.text)

    def capture(self, name: str) -> Capture:
        """Returns a capture by its name."""
        return next(c for c in self.items if isinstance(c, Capture) and c.name == name)

    def match(self, name: str) -> dict[str, str] | None:
        """Returns the captures of a name; None if it does not match.

        Of several ways to match, the one is taken where the first capture is shortest, then the
        second, and so on.
        """
        if not name.startswith(self._head) or not name.endswith(self._tail):
            return None
        if not self.captures:
            return {} if name == self._head else None
        ends = [{len(name)}]  # for each item, the last first, where it may stop
        for item in reversed(self.items[1:]):
            if isinstance(item, str):
                size = len(item)
                starts = {end - size for end in ends[-1] if name.startswith(item, end - size)}
                starts = {start for start in starts if start >= 0}
            else:
                starts = item.starts(name, ends[-1])
            if not starts:
                return None
            ends.append(starts)
        found: dict[str, str] = {}
        at = 0
        for item, stops in zip(self.items, reversed(ends), strict=True):
            if isinstance(item, str):
                if not name.startswith(item, at) or at + len(item) not in stops:
                    return None
                at += len(item)
                continue
            stop = _shortest(item, name, at, stops)
            if stop is None or found.get(item.name, name[at:stop]) != name[at:stop]:
                return None
            if item.name:
                found[item.name] = name[at:stop]
            at = stop
        return found

    def format(self, captures: Mapping[str, str]) -> str:
        """Returns the name for the given texts of the captures."""
        return "".join(
            item if isinstance(item, str) else captures[item.name] for item in self.items
        )


def _shortest(capture: Capture, name: str, at: int, stops: set[int]) -> int | None:
    for stop in range(at + bool(capture.name), len(name) + 1):
        if stop in stops and capture.accepts(name[at:stop]):
            return stop
        if capture.name and not capture.many and not capture.words and name[stop - 1] == ".":
            return None
    return None


def _parse(text: str) -> list[Item]:
    if len(text) > _LONGEST:
        raise CheckpointError(f"the pattern has {len(text)} characters; {_LONGEST} are allowed")
    items: list[Item] = []
    for escaped, inner, star, wrong, plain in _TOKEN.findall(text):
        if wrong:
            raise CheckpointError(
                f"the pattern {text!r} has an unmatched {wrong!r}. Write {{name}} for a capture, "
                f"\\{wrong} for the character"
            )
        if star:
            items.append(Capture(""))
        elif escaped or plain:
            items.append(escaped or plain)
        else:
            items.append(_capture(inner, text))
    joined: list[Item] = []
    for item in items:
        last = joined[-1] if joined else None
        if isinstance(item, str) and isinstance(last, str):
            joined[-1] = last + item
        elif isinstance(item, Capture) and isinstance(last, Capture):
            raise CheckpointError(f"two captures in {text!r} have nothing between them")
        else:
            joined.append(item)
    if len(joined) > _MOST_ITEMS:
        raise CheckpointError(f"the pattern {text[:60]!r}... has more than {_MOST_ITEMS} parts")
    return joined


def _capture(inner: str, text: str) -> Capture:
    match = _CAPTURE.fullmatch(inner)
    if not match:
        raise CheckpointError(
            f"{{{inner}}} in {text!r} is not a capture: write {{name}}, {{name...}}, {{name:0-31}} "
            "or {name:q|k|v}"
        )
    name, dots, first, last, words = match.groups()
    numbers = (int(first), int(last)) if first else None
    return Capture(name, bool(dots), tuple(words.split("|")) if words else (), numbers)


@functools.lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern:
    """Parses a pattern.

    Raises:
        CheckpointError: It is none.
    """
    return Pattern(text)


def literal(name: str) -> str:
    """Returns the pattern that matches one name."""
    return re.sub(r"([{}*\\])", r"\\\1", name)
