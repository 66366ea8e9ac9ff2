"""Rules that select parts of a tree by path or class, and the rule that applies to each leaf."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from fmapper.errors import PlacementError
from fmapper.tree.keypath import KeyPath, Link, format_link
from fmapper.tree.nodes import ATOM, NodeType, kind_of
from fmapper.tree.pattern import Pattern, Positions
from fmapper.tree.walk import walk

Selector: TypeAlias = str | type
"""A path pattern or a class."""

_TAKEN: Final[Positions] = frozenset({(-1, 0)})  # the rule has matched at this place or above


class _State:
    """The progress of all rules at one place of a tree; equal states are the same object."""

    __slots__ = ("after", "inside", "rules", "winner")

    def __init__(self, rules: tuple[Positions, ...], order: Sequence[int]) -> None:
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
        self.patterns: tuple[Selector, ...] = tuple(patterns)
        for pattern in self.patterns:
            if not isinstance(pattern, str | type):
                raise PlacementError(
                    f"a rule selects leaves by a path pattern or a class, not by {pattern!r}."
                )
        self.paths = {at: p for at, p in enumerate(self.patterns) if isinstance(p, str)}
        for text in self.paths.values():
            Pattern(text, PlacementError)
        self.order = sorted(range(len(self.patterns)), key=lambda at: self.patterns[at] == "*")

    def find_matches(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Found:
        """Finds the rules that match the nodes and leaves of a tree.

        Raises:
            PlacementError: A rule matches nothing, or earlier rules take all of its matches.
        """
        return Found(self, tree, is_leaf)


class Found:
    """The matches of rules in one tree.

    Attributes:
        rules: For each object, by id: each rule that takes it at some place -> the first such
            place. The key None has the first place that no rule takes.
        objects: The objects, kept alive so that the ids stay valid.
    """

    def __init__(self, rules: Rules, tree: Any, is_leaf: Callable[[Any], bool] | None) -> None:
        self.rules: dict[int, dict[int | None, Link]] = {}
        self.objects: dict[int, Any] = {}
        self._all = rules
        self._states: dict[tuple[Positions, ...], _State] = {}
        self._is_leaf = is_leaf
        self._matched: dict[int, Link] = {}
        self._won: set[int] = set()
        self._lent: list[tuple[int, int | None, Link]] = []  # places of borrowed arrays
        self._leads: dict[int, Any] = {}
        self._paths = {
            at: Pattern(self._own(text, tree), PlacementError) for at, text in rules.paths.items()
        }
        self._look(tree)
        self._follow()
        self._check()

    def _look(self, tree: Any) -> None:
        """Records the rules under which each object is reached."""
        starts: list[Positions] = [frozenset()] * len(self._all.patterns)
        for at, path in self._paths.items():
            starts[at] = _TAKEN if path.accepts(path.start) else path.start
        first = self._inside(self._state(starts), tree)

        def down(above: tuple[_State, bool], node: Any, key: Any, child: Any) -> Any:
            state, lent = above
            kind = kind_of(type(node))
            assert isinstance(kind, NodeType)
            text = f"{key}" if node is tree else f".{key}"
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
        matched = set(self.rules)
        followers = []
        for i, won, link in self._lent:
            if i in self._leads:
                followers.append((i, won, link))
            elif i not in matched:
                self.rules.setdefault(i, {}).setdefault(won, link)
        for i, won, link in followers:
            lead = self.rules.get(id(self._leads[i]), {won: link})
            self.rules[i] = dict.fromkeys(lead, link)

    def _state(self, rules: Sequence[Positions]) -> _State:
        key = tuple(rules)
        if key not in self._states:
            self._states[key] = _State(key, self._all.order)
        return self._states[key]

    def _after(self, state: _State, text: str) -> _State:
        """Returns the state after one more key, before rules for classes apply."""
        following = state.after.get(text)
        if following is None:
            new = list(state.rules)
            for at, path in self._paths.items():
                if new[at] is not _TAKEN:
                    positions = path.after(new[at], text)
                    new[at] = _TAKEN if path.accepts(positions) else positions
            following = state.after[text] = self._state(new)
        return following

    def _inside(self, state: _State, thing: Any) -> _State:
        """Returns the state at an object after rules for its class apply."""
        cls = type(thing)
        inside = state.inside.get(cls)
        if inside is None:
            new = list(state.rules)
            for at, pattern in enumerate(self._all.patterns):
                if not isinstance(pattern, str) and isinstance(thing, pattern):
                    new[at] = _TAKEN
            inside = state.inside[cls] = self._state(new)
        return inside

    def _own(self, pattern: str, tree: Any) -> str:
        """Returns a pattern from the root, without the leading `model` of messages."""
        rest = pattern.removeprefix("model")
        if rest == pattern or rest[:1] not in ("", ".", "["):
            return pattern
        kind = kind_of(type(tree))
        if isinstance(kind, NodeType) and any(key == "model" for key, _ in kind.items(tree)):
            return pattern
        return rest.removeprefix(".")

    # --- rules without effect -------------------------------------------------------------------

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
        """Returns a rule as the user wrote it."""
        pattern = self._all.patterns[rule]
        return repr(pattern) if isinstance(pattern, str) else pattern.__qualname__

    def _close(self, pattern: Selector) -> str:
        if isinstance(pattern, str):
            links = [link for places in self.rules.values() for link in places.values()]
            names = {str(KeyPath.from_link(link)) for link in links} - {""}
            wanted = pattern.removeprefix("model.")
        else:
            names = {type(x).__qualname__ for x in self.objects.values()}
            wanted = pattern.__qualname__
        close = difflib.get_close_matches(wanted.strip(".*"), names, n=4, cutoff=0.5)
        close = close or sorted(names, key=len)[:4]
        return f"; the tree has {', '.join(close)}" if close else ""
