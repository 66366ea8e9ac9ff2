"""The rules that say what an assignment has decided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from fmapper.tree.pattern import Pattern
from fmapper.twins.groups import Group, Index
from fmapper.twins.layouts import Layout, Steps
from fmapper.twins.matches import Decision, Match, Option

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rule import Rule
    from fmapper.checkpoints.rules.rules import Rules

_LETTERS = "ijklmnop"


def rules_of(
    decisions: Iterable[Decision],
    tied: Mapping[str, str] = MappingProxyType({}),
    dropped: Sequence[str] = (),
    ties: Mapping[str, str] = MappingProxyType({}),
    prefix: str = "",
) -> Rules:
    """Returns the rules for the arrays of a source, which make those of the target of them.

    Args:
        decisions: The pairs.
        tied: Second names of arrays of the source -> the first, which is used.
        dropped: Names of the source that nothing takes.
        ties: Second names of arrays of the target -> the first.
        prefix: A prefix for all names of the source, so that none is one of the target.
    """
    from fmapper.checkpoints.rules.naming import Drop, Rename, Tie
    from fmapper.checkpoints.rules.rules import Rules

    first: list[Rule] = [
        Drop(Pattern.escape(name), tied_to=Pattern.escape(of)) for name, of in tied.items()
    ]
    if dropped:
        first.append(Drop([*map(Pattern.escape, dropped)], forget=True))
    if prefix:
        first.append(Rename("{name...}", f"{prefix}{{name...}}"))
    forward, backward = _Writer(prefix), _Writer(prefix)
    renames: dict[str, str] = {}
    for decision in decisions:
        match, option = decision.match, decision.option
        writer = backward if match.back else forward
        if len(match.many) > 1 or match.over:
            writer.join(match, option)
            continue
        writer.change(match, 0, option)
        for (many,), one in _patterns(match.many, (), match.one):
            old, new = (one, many) if match.back else (many, one)
            if prefix + old != new:
                renames[prefix + old] = new
    return Rules([
        *first,
        *forward.rules(),
        *Rules(backward.rules()).inverse(),
        *([Rename(renames)] if renames else []),
        *(Tie(Pattern.escape(of), Pattern.escape(name)) for name, of in ties.items()),
    ])  # fmt: skip


def _patterns(
    groups: Sequence[Group], over: tuple[int, ...], one: Group
) -> Iterator[tuple[list[str], str]]:
    """Yields patterns for the names of groups, and for that of what they become.

    Numbers that stand in both are captures, and so are those that are stacked.
    """
    columns = [
        [*dict.fromkeys(tuple(n for at, n in enumerate(i) if at not in over) for i in g.members)]
        for g in groups
    ]
    captures = _captures([tuple(index[slot] for slot in over) for index in groups[0].members])
    inner = dict(zip(over, captures, strict=True))
    keys = [*one.members]
    sizes = (max(column) - min(column) + 1 for column in zip(*keys, strict=True))
    if all(column == keys for column in columns) and len(keys) == math.prod(sizes):
        ranges = _captures(keys, _LETTERS[len(over) :])
        yield [_fill(group, inner, ranges) for group in groups], _fill(one, {}, ranges)
        return
    for numbers, index in zip(zip(*columns, strict=True), keys, strict=True):
        many = [_fill(g, inner, [*map(str, own)]) for g, own in zip(groups, numbers, strict=True)]
        yield many, _fill(one, {}, [*map(str, index)])


def _captures(keys: Sequence[Index], letters: str = _LETTERS) -> list[str]:
    """Returns a capture for each number, with its range."""
    columns = zip(letters, zip(*keys, strict=True), strict=False)
    return [f"{{{letter}:{min(column)}-{max(column)}}}" for letter, column in columns]


def _fill(group: Group, captures: Mapping[int, str], rest: Sequence[str]) -> str:
    """Returns a pattern: the pieces of a name with captures or numbers between them."""
    numbers = iter(rest)
    texts = [Pattern.escape(group.pieces[0])]
    for slot, piece in enumerate(group.pieces[1:]):
        texts += [captures.get(slot) or next(numbers), Pattern.escape(piece)]
    return "".join(texts)


class _Writer:
    """The rules for the matches of one direction, those of one kind together."""

    def __init__(self, prefix: str) -> None:
        self._levels: list[dict[tuple[object, ...], list[str]]] = []
        self._joins: list[Rule] = []
        self._prefix = prefix

    def rules(self) -> list[Rule]:
        """Returns the rules: layouts first, then what is joined and stacked."""
        return [
            *(
                rule
                for level in self._levels
                for step, names in level.items()
                for rule in Layout((step,)).rules(names)
            ),
            *self._joins,
        ]

    def change(self, match: Match, at: int, option: Option, more: Steps = ()) -> None:
        """Adds the layouts of the arrays of a group, followed by further steps."""
        group, known = match.many[at], option.layouts[at]
        by_steps: dict[Steps, list[str]] = {}
        for parts, entry in match.rows():
            for part in parts[at]:
                steps = (*known[part.shape, entry.shape].steps, *more)
                by_steps.setdefault(steps, []).append(Pattern.escape(part.name))
        patterns = [many[0] for many, _ in _patterns([group], (), group)]
        prefix = "" if match.back else self._prefix
        for steps, names in by_steps.items():
            shown = patterns if len(by_steps) == 1 else names
            for level, step in enumerate(steps):
                while len(self._levels) <= level:
                    self._levels.append({})
                self._levels[level].setdefault(step, []).extend(prefix + name for name in shown)

    def join(self, match: Match, option: Option) -> None:
        """Adds the rules for arrays that become parts of one, or numbers that become dimensions."""
        from fmapper.checkpoints.rules.joining import Concatenate, Stack

        (parts, entry), *_ = match.rows()
        inner = tuple(n for axis, n in enumerate(entry.shape) if axis not in option.axes)
        more: Steps = ()
        if option.new:
            shape = (*inner[: option.axis], *inner[option.axis + 1 :])
            more = (("reshape", (*shape[: option.axis], 1, *shape[option.axis :]), shape),)
        for at in range(len(match.many)):
            self.change(match, at, option, more)
        groups = [match.many[at] for at in option.order]
        ranges = _captures([tuple(i[s] for s in match.over) for i in groups[0].members])
        for many, one in _patterns(groups, match.over, match.one):
            old = many if match.back else [self._prefix + name for name in many]
            new = self._prefix + one if match.back else one
            names = [".".join([new, *ranges[:at]]) for at in range(len(ranges))]
            if len(groups) > 1:
                inmost = ".".join([new, *ranges])
                row = math.prod(inner) // inner[option.axis]
                sizes = [math.prod(parts[at][0].shape) // row for at in option.order]
                uneven = sizes if len({*sizes}) > 1 else None
                self._joins.append(Concatenate(old, inmost, option.axis, uneven))
                self._joins += Layout(option.after).rules([inmost])
                old = [inmost]
            for name, letter, axis in reversed([*zip(names, _LETTERS, option.axes, strict=False)]):
                self._joins.append(Stack(old[0], name, letter, axis))
                old = [name]
