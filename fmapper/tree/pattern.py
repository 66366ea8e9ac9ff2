r"""Patterns for paths and names: `layers.{i}.attn.{rest...}`, `encoder[2:5].*norm*`.

Items of a pattern:

    *               anything, or nothing; what it matches has no name
    {name}          a part of a key: anything without a dot
    {name...}       one key or more, with the dots between them
    {name:0-31}     a number from 0 to 31
    {name:q|k|v}    one of these words
    [3]  [2:5]      an index, and a slice of a list: `layers[3].w` is `layers.3.w`
    ['a.b']         a key verbatim

A backslash escapes a brace, bracket or star. A capture that occurs twice matches the same text
twice. Each item of a pattern looks at each position of a text once, so the time is bounded by the
product of their lengths.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from fmapper.errors import CheckpointError, FmapperError

_TOKEN = re.compile(
    r"""\\(?P<escaped>.)|\{(?P<capture>[^{}]*)\}|(?P<star>\*+)|(?P<plain>[^\\{}*\[\]]+)"""
    r"""|\[(?:(?P<slice>-?\d*:-?\d*)|(?P<index>\d+)|(?P<any>\*)"""
    r"""|(?P<key>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"))\]|(?P<wrong>.)""",
    re.DOTALL,
)
_CAPTURE = re.compile(r"(\w+)(?:(\.\.\.)|:(\d{1,9})-(\d{1,9})|:([^:{}]+))?", re.ASCII)
_MOST_ITEMS = 64
_LONGEST = 4096  # characters of a pattern; a name may have 1024
_NO_END: Final = 1 << 62

Positions: TypeAlias = "frozenset[_Position]"
_Position: TypeAlias = tuple[int, int]  # an item, and how many of its characters are read
_State: TypeAlias = tuple[_Position, int]  # a position of the pattern, and one in the text


class _Key(str):
    """A key verbatim, whose dots are part of it."""

    __slots__ = ()


@dataclass(frozen=True)
class Capture:
    """A variable part of a pattern.

    Attributes:
        name: Its name; empty for `*` and slices.
        many: Whether the text may have dots.
        words: The texts that are allowed; any if empty.
        numbers: The first and last allowed number; None if any text is allowed.
    """

    name: str
    many: bool = False
    words: tuple[str, ...] = ()
    numbers: tuple[int, int] | None = None

    @property
    def is_slice(self) -> bool:
        """Whether this is a slice, which matches whole keys."""
        return not self.name and self.numbers is not None

    def stops(self, text: str, at: int) -> Iterator[int]:
        """Yields the possible ends of a word or number that begins at `at`, the last first."""
        if self.words:
            ends = {at + len(word) for word in self.words if text.startswith(word, at)}
            yield from sorted(ends, reverse=True)
        for stop in range(min(at + 9, len(text)), at, -1) if self.numbers else ():
            is_key = text[at - 1 : at] in ("", ".") and text[stop : stop + 1] in ("", ".")
            if (is_key or not self.is_slice) and self._allows(text[at:stop]):
                yield stop

    def _allows(self, text: str) -> bool:
        assert self.numbers is not None
        first, last = self.numbers
        is_plain = text.isascii() and text.isdigit() and str(int(text)) == text
        return is_plain and first <= int(text) <= last


Item: TypeAlias = str | Capture


class Pattern:
    """A pattern for paths and names; see the module.

    Args:
        text: The pattern.
        error: The class of the error for an invalid pattern.

    Examples:
        >>> Pattern("layers.{i}.{rest...}").match("layers.3.attn.q.weight")
        {'i': '3', 'rest': 'attn.q.weight'}
        >>> Pattern("blocks.{i}.{rest...}").format({"i": "3", "rest": "attn.q.weight"})
        'blocks.3.attn.q.weight'

    Raises:
        CheckpointError: The text is not a pattern.
    """

    def __init__(self, text: str, error: type[FmapperError] = CheckpointError) -> None:
        self.text = text
        self.items = _parse(text, error)
        self.captures = list(
            dict.fromkeys(item.name for item in self.items if isinstance(item, Capture))
        )
        self._literals = [item for item in self.items if isinstance(item, str)]

    def __repr__(self) -> str:
        """Returns the text."""
        return repr(self.text)

    @staticmethod
    def escape(name: str) -> str:
        """Returns the pattern that matches one name, or a part of it."""
        return re.sub(r"([{}*\\\[\]])", r"\\\1", name)

    def capture(self, name: str) -> Capture:
        """Returns a capture by its name."""
        return next(c for c in self.items if isinstance(c, Capture) and c.name == name)

    def format(self, captures: Mapping[str, str]) -> str:
        """Returns the name for the given texts of the captures."""
        return "".join(
            item if isinstance(item, str) else captures[item.name] for item in self.items
        )

    def match(self, name: str) -> dict[str, str] | None:
        """Returns the captures of a name; None if it does not match as a whole.

        Of several matches, the one with the shortest first capture wins, then second, and so on.
        """
        if not self.captures:
            return {} if name == self.format({}) else None
        if not all(literal in name for literal in self._literals):
            return None
        state: _State | None = ((len(self.items), 0), len(name))
        before: dict[_State, _State | None] = {}
        if not any(reached == state for reached in self._read(name, [((0, 0), 0)], before)):
            return None
        places: dict[int, int] = {}  # where each item begins
        while state is not None:
            (item, read), at = state
            if not read:
                places[item] = at
            state = before[state]
        captures: dict[str, str] = {}
        for i, item_ in enumerate(self.items):
            if isinstance(item_, Capture) and item_.name:
                text = name[places[i] : places[i + 1]]
                if captures.setdefault(item_.name, text) != text:
                    return None
        return captures

    def occurs_in(self, name: str) -> bool:
        """Returns whether some keys of a name, one after the other, match."""
        if not all(literal in name for literal in self._literals):
            return False
        starts = [0, *(at for at, before in enumerate(name, 1) if before == ".")]
        reached = self._read(name, [((0, 0), at) for at in starts], {})
        ends = (at for (item, _), at in reached if item == len(self.items))
        return any(name[at : at + 1] in ("", ".") for at in ends)

    # --- key by key -----------------------------------------------------------------------------

    @functools.cached_property
    def start(self) -> Positions:
        """The positions of a pattern before any key."""
        return self.after(frozenset({(0, 0)}), "")

    def after(self, positions: Positions, text: str) -> Positions:
        """Returns the positions after one more key of a path, with the dot before it."""
        starts = [(position, 0) for position in positions]
        reached = self._read(text, starts, {}, by_key=True)
        return frozenset(position for position, at in reached if at == len(text))

    def accepts(self, positions: Positions) -> bool:
        """Returns whether the keys that have been read match."""
        return (len(self.items), 0) in positions

    def _read(
        self,
        text: str,
        starts: Iterable[_State],
        before: dict[_State, _State | None],
        by_key: bool = False,
    ) -> Iterator[_State]:
        """Yields the reachable states, depth first, and records the predecessor of each.

        With `by_key` more text may follow: an item may be unfinished at the end of this one.
        """
        todo: list[tuple[_State, _State | None]] = [(state, None) for state in starts]
        while todo:
            state, origin = todo.pop()
            if state not in before:
                before[state] = origin
                yield state
                todo += [(new, state) for new in self._steps(text, by_key, *state)]

    def _steps(self, text: str, by_key: bool, position: _Position, at: int) -> Iterator[_State]:
        """Yields the successors of a state, those that take the longest text first."""
        i, read = position
        item = self.items[i] if i < len(self.items) else None
        if isinstance(item, str):
            size = min(len(item) - read, len(text) - at)
            if size and text.startswith(item[read : read + size], at):
                if read + size == len(item):
                    yield (i + 1, 0), at + size
                elif by_key and not isinstance(item, _Key):
                    yield (i, read + size), at + size
        elif item is not None and (item.words or item.numbers):
            for stop in item.stops(text, at):
                yield (i + 1, 0), stop
        elif item is not None and by_key:
            if at < len(text) and (item.many or text[at] != "."):
                yield (i, 1), at + 1
            if read or not item.name:
                yield (i + 1, 0), at
        elif item is not None:
            first = at + (not read and bool(item.name))
            last = len(text) if item.many else text.find(".", at) % (len(text) + 1)  # -1: the end
            following = self.items[i + 1] if i + 1 < len(self.items) else None
            stop = last
            if isinstance(following, str):
                stop = text.find(following, first, last + len(following))
            if first <= stop < last:
                yield (i, 1), stop + 1
            if first <= stop:
                yield (i + 1, 0), stop


def _parse(text: str, error: type[FmapperError]) -> list[Item]:
    if len(text) > _LONGEST:
        raise error(f"the pattern has {len(text)} characters; {_LONGEST} are allowed")
    items: list[Item] = []
    for token in _TOKEN.finditer(text):
        try:
            item = _item(token)
        except ValueError as problem:
            raise error(str(problem)) from None
        last = items[-1] if items else None
        if token[0].startswith("[") and last is not None:  # where a path has no dot
            items.append(last := ".")
        if type(item) is str and type(last) is str:
            items[-1] = last + item
        elif isinstance(item, Capture) and isinstance(last, Capture) and not last.is_slice:
            raise error(f"two captures in {text!r} have nothing between them")
        else:
            items.append(item)
    if len(items) > _MOST_ITEMS:
        raise error(f"the pattern {text[:60]!r}... has more than {_MOST_ITEMS} parts")
    return items


def _item(token: re.Match[str]) -> Item:
    text = token.string
    if token["capture"] is not None:
        return _capture(token["capture"], text)
    if token["star"] or token["any"]:
        return Capture("", many=True)
    if token["key"]:
        return _Key(ast.literal_eval(token["key"]))
    if token["slice"]:
        first, stop = (int(end) if end else None for end in token["slice"].split(":"))
        if min(first or 0, stop or 0) < 0:
            raise ValueError(f"{text!r}: a slice counts from the start, [2:5], [2:] or [:5].")
        return Capture("", numbers=(first or 0, _NO_END if stop is None else stop - 1))
    if token["wrong"] in ("{", "}", "\\"):
        raise ValueError(
            f"the pattern {text!r} has an unmatched {token[0]!r}. Write {{name}} for a capture, "
            f"\\{token[0]} for the character"
        )
    if token["wrong"]:
        raise ValueError(
            f"{text!r} is not a path pattern: cannot parse {text[token.start() :]!r}. Write it "
            "like encoder, encoder.*, layers[0].weight, layers[2:5] or ['a.b']."
        )
    return token["escaped"] or token["index"] or token["plain"]


def _capture(inner: str, text: str) -> Capture:
    match = _CAPTURE.fullmatch(inner)
    if not match:
        raise ValueError(
            f"{{{inner}}} in {text!r} is not a capture: write {{name}}, {{name...}}, {{name:0-31}} "
            "or {name:q|k|v}"
        )
    name, dots, first, last, words = match.groups()
    numbers = (int(first), int(last)) if first else None
    return Capture(name, bool(dots), tuple(words.split("|")) if words else (), numbers)


@functools.lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern:
    """Parses a pattern of a rule for checkpoints.

    Raises:
        CheckpointError: The text is not a pattern.
    """
    return Pattern(text)
