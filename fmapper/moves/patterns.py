"""Rules that select parts of a tree by path or class, and the rule that applies to each leaf."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from fmapper.errors import PlacementError
from fmapper.tree.keypath import KeyPath, Link, format_link
from fmapper.tree.nodes import ATOM, NodeType, kind_of
from fmapper.tree.walk import walk

Pattern = str | type

_SEPARATOR: Final = "\0"  # between two keys of a path, where a name has a dot
_TOKEN = re.compile(
    r"""(?P<star>\*+)|\[(?P<range>-?\d*:-?\d*)\]|\[(?P<index>\d+|\*)\]"""
    r"""|\[(?P<key>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")\]|(?P<char>[^\[\]*])"""
)
_STAR, _DOT = object(), object()
_Positions = frozenset[int]


class _Path:
    """A path pattern: steps over a path key by key, as an automaton that is built as it is used.

    Its tokens are characters, `_DOT` for the border of two keys (or a dot in one), `_STAR` for
    anything at all, and a range of indices, which takes a whole key.
    """

    def __init__(self, text: str) -> None:
        self.tokens: list[Any] = []
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise PlacementError(
                    f"{text!r} is not a path pattern: cannot parse {text[at:]!r}. Write it like "
                    "encoder, encoder.*, layers[0].weight, layers.*.weight, layers[2:5] or ['a.b']."
                )
            self._add(found, first=at == 0)
            at = found.end()
        self.start = self._closure([0])

    def _add(self, found: re.Match[str], *, first: bool) -> None:
        if found["star"]:
            self.tokens.append(_STAR)
            return
        if found["char"]:
            self.tokens.append(_DOT if found["char"] == "." else found["char"])
            return
        if not first:
            self.tokens.append(_DOT)
        if found["range"]:
            low, high = (int(end) if end else None for end in found["range"].split(":"))
            if min(low or 0, high or 0) < 0:
                raise PlacementError(
                    f"{found.string!r}: a slice counts from the start, [2:5], [2:] or [:5]."
                )
            self.tokens.append(range(low or 0, 1 << 62 if high is None else high))
        elif found["index"] == "*":
            self.tokens.append(_STAR)
        else:
            self.tokens += found["index"] or str(ast.literal_eval(found["key"]))

    def accepts(self, positions: _Positions) -> bool:
        return len(self.tokens) in positions

    def after(self, positions: _Positions, text: str) -> _Positions:
        """Advances the states of the pattern by one key; `text` is its separator and the key."""
        key = text.removeprefix(_SEPARATOR)
        if key != text:
            positions = self._step(positions, _SEPARATOR)
        whole = []
        if key.isdecimal():
            for at in positions:
                token = self.tokens[at] if at < len(self.tokens) else None
                if isinstance(token, range) and int(key) in token:
                    whole.append(at + 1)
        for char in key:
            if not positions:
                break
            positions = self._step(positions, char)
        return positions | self._closure(whole)

    def _step(self, positions: _Positions, char: str) -> _Positions:
        reached = []
        for at in positions:
            token = self.tokens[at] if at < len(self.tokens) else None
            if token is _STAR:
                reached.append(at)
            elif token == char or (token is _DOT and char in (_SEPARATOR, ".")):
                reached.append(at + 1)
        return self._closure(reached)

    def _closure(self, positions: Iterable[int]) -> _Positions:
        """Adds the states that are reached where a star matches nothing."""
        found = set(positions)
        for at in tuple(found):
            while at < len(self.tokens) and self.tokens[at] is _STAR:
                at += 1  # noqa: PLW2901
                found.add(at)
        return frozenset(found)


_TAKEN: Final[_Positions] = frozenset({-1})  # the rule has matched here or above


class _State:
    """The progress of every rule at one place of a tree; equal states are one object."""

    __slots__ = ("after", "inside", "rules", "winner")

    def __init__(self, rules: tuple[_Positions, ...], order: Sequence[int]) -> None:
        self.rules = rules
        self.winner = next((rule for rule in order if rules[rule] is _TAKEN), None)
        self.after: dict[str, _State] = {}
        self.inside: dict[type, _State] = {}


class Rules:
    """Path patterns and classes, in the order in which they are tried.

    Raises:
        PlacementError: A pattern cannot be read, or is neither a string nor a class.
    """

    def __init__(self, patterns: Sequence[Any]) -> None:
        self.patterns: tuple[Pattern, ...] = tuple(patterns)
        for pattern in self.patterns:
            if not isinstance(pattern, str | type):
                raise PlacementError(
                    f"a rule selects leaves by a path pattern or a class, not by {pattern!r}."
                )
        self.paths = {at: p for at, p in enumerate(self.patterns) if isinstance(p, str)}
        for text in self.paths.values():
            _Path(text)
        self.order = sorted(range(len(self.patterns)), key=lambda at: self.patterns[at] == "*")

    def find_matches(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Found:
        """Finds the rules that match the nodes and leaves of a tree.

        Raises:
            PlacementError: A rule matches nothing, or other rules take all that it matches.
        """
        return Found(self, tree, is_leaf)


class Found:
    """The matches of rules in one tree.

    Attributes:
        rules: For each object, by its id: the first of its places under each rule that takes it
            there, or under None where no rule does.
        objects: The objects, so that the ids stay theirs.
    """

    def __init__(self, rules: Rules, tree: Any, is_leaf: Callable[[Any], bool] | None) -> None:
        self.rules: dict[int, dict[int | None, Link]] = {}
        self.objects: dict[int, Any] = {}
        self._all = rules
        self._states: dict[tuple[_Positions, ...], _State] = {}
        self._is_leaf = is_leaf
        self._matched: dict[int, Link] = {}
        self._won: set[int] = set()
        self._lent: list[tuple[int, int | None, Link]] = []  # places that do not decide
        self._leads: dict[int, Any] = {}
        self._paths = {at: _Path(self._own(text, tree)) for at, text in rules.paths.items()}
        self._look(tree)
        self._follow()
        self._check()

    def _look(self, tree: Any) -> None:
        """Records the rules under which each object is reached."""
        starts = [frozenset[int]()] * len(self._all.patterns)
        for at, path in self._paths.items():
            starts[at] = _TAKEN if path.accepts(path.start) else path.start
        first = self._inside(self._state(starts), tree)

        def down(above: tuple[_State, bool], node: Any, key: Any, child: Any) -> Any:
            state, lent = above
            kind = kind_of(type(node))
            assert isinstance(kind, NodeType)
            text = f"{key}" if node is tree else f"{_SEPARATOR}{key}"
            return self._inside(self._after(state, text), child), lent or key in kind.borrowed

        places = walk(tree, is_leaf=self._is_leaf, state=(first, False), down=down)
        for link, value, kind, (state, lent) in places:
            self._meet(link, value, state, lent)
            if isinstance(kind, NodeType):
                for name, passenger in kind.passengers(value) if kind.passengers else ():
                    self.objects[id(passenger)] = passenger
                    rules = self.rules.setdefault(id(passenger), {})
                    rules.setdefault(state.winner, (link, name))
                for follower, lead in kind.follows(value) if kind.follows else ():
                    self._leads[id(follower)] = lead

    def _meet(self, link: Link, value: Any, state: _State, lent: bool) -> None:
        i, won = id(value), state.winner
        if won is not None:
            self._won.add(won)
        for rule, positions in enumerate(state.rules):
            if positions is _TAKEN:
                self._matched.setdefault(rule, link)
        if kind_of(type(value)) is ATOM:
            return
        self.objects[i] = value
        if lent or i in self._leads:
            self._lent.append((i, won, link))
        else:
            self.rules.setdefault(i, {}).setdefault(won, link)

    def _follow(self) -> None:
        """Routes the parameters of an optimizer, and their state, by their places in the model."""
        here = set(self.rules)
        followers = []
        for i, won, link in self._lent:
            if i in self._leads:
                followers.append((i, won, link))
            elif i not in here:
                self.rules.setdefault(i, {}).setdefault(won, link)
        for i, won, link in followers:
            lead = self.rules.get(id(self._leads[i]), {won: link})
            self.rules[i] = dict.fromkeys(lead, link)

    def _state(self, rules: Sequence[_Positions]) -> _State:
        key = tuple(rules)
        if key not in self._states:
            self._states[key] = _State(key, self._all.order)
        return self._states[key]

    def _after(self, state: _State, text: str) -> _State:
        """Returns the state after one more key, before classes are considered."""
        found = state.after.get(text)
        if found is None:
            new = list(state.rules)
            for at, path in self._paths.items():
                if new[at] is not _TAKEN:
                    positions = path.after(new[at], text)
                    new[at] = _TAKEN if path.accepts(positions) else positions
            found = state.after[text] = self._state(new)
        return found

    def _inside(self, state: _State, thing: Any) -> _State:
        """Returns the state at an object after the rules for its class."""
        cls = type(thing)
        found = state.inside.get(cls)
        if found is None:
            new = list(state.rules)
            for at, pattern in enumerate(self._all.patterns):
                if not isinstance(pattern, str) and isinstance(thing, pattern):
                    new[at] = _TAKEN
            found = state.inside[cls] = self._state(new)
        return found

    def _own(self, pattern: str, tree: Any) -> str:
        """Returns a pattern from the root, without the `model` that begins paths in messages."""
        rest = pattern.removeprefix("model")
        if rest == pattern or rest[:1] not in ("", ".", "["):
            return pattern
        kind = kind_of(type(tree))
        if isinstance(kind, NodeType) and any(key == "model" for key, _ in kind.items(tree)):
            return pattern
        return rest.removeprefix(".")

    # --- rules that do nothing ------------------------------------------------------------------

    def _check(self) -> None:
        problems = []
        for at, pattern in enumerate(self._all.patterns):
            if at not in self._matched:
                problems.append(f"{self.name(at)} matches nothing{self._close(pattern)}")
            elif at not in self._won:
                where = format_link(self._matched[at])
                problems.append(
                    f"{self.name(at)} never applies: earlier rules match all of its leaves, such "
                    f"as {where}. The first match applies, so move it before them"
                )
        if problems:
            raise PlacementError("\n".join(f"the rule {problem}." for problem in problems))

    def name(self, rule: int) -> str:
        """Returns a rule as its user wrote it."""
        pattern = self._all.patterns[rule]
        return repr(pattern) if isinstance(pattern, str) else pattern.__qualname__

    def _close(self, pattern: Pattern) -> str:
        if isinstance(pattern, str):
            links = [link for places in self.rules.values() for link in places.values()]
            known = {str(KeyPath.from_link(link)) for link in links} - {""}
            asked = pattern.removeprefix("model.")
        else:
            known = {type(x).__qualname__ for x in self.objects.values()}
            asked = pattern.__qualname__
        close = difflib.get_close_matches(asked.strip(".*"), known, n=4, cutoff=0.5)
        close = close or sorted(known, key=len)[:4]
        return f"; the tree has {', '.join(close)}" if close else ""
