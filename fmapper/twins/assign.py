"""The assignment of the groups of two models by their names, shapes and layers.

A pair is sure if names and shapes agree on it and nothing else could be meant. The rest is
proposed, with what else it could be, for the outputs of both models to decide.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from fmapper.twins.groups import Group, groups_of
from fmapper.twins.matches import (
    LAYERS,
    NAMES,
    ROLE,
    SHAPES,
    Decision,
    Match,
    Option,
    flattenings,
    joins,
    kind_of,
    match_of,
    rotations,
)
from fmapper.twins.sides import Entry
from fmapper.twins.words import PLACES, place_of

if TYPE_CHECKING:
    from fmapper.twins.roles import Roles

Key: TypeAlias = tuple[int, tuple[int, ...]]

_Index: TypeAlias = dict[Key, list[tuple[Group, tuple[int, ...]]]]

FEW = 32  # numbers that may each be something else, rather than layers


@dataclass(eq=False)
class Assignment:
    """The decisions about all groups, and the groups that are left.

    Attributes:
        decisions: One for each match.
        sources: The groups of the source that nothing takes.
        targets: The groups of the target that nothing fills.
    """

    decisions: list[Decision]
    sources: list[Group]
    targets: list[Group]


def assign(
    sources: Iterable[Entry], targets: Iterable[Entry], roles: Roles | None = None
) -> Assignment:
    """Assigns the parameters of a source to those of a target, also by their roles if given."""
    rows, columns = _matching_groups(groups_of(sources), groups_of(targets))
    found = _Assigner(rows, columns, roles).run()
    if found.sources and found.targets:
        rows, columns = (
            [part for group in groups for part in _alone(group)]
            for groups in (found.sources, found.targets)
        )
        rest = _Assigner(rows, columns, roles).run()
        found = Assignment([*found.decisions, *rest.decisions], rest.sources, rest.targets)
    _doubt_rotations(found.decisions)
    _doubt_flattenings(found.decisions)
    return found


def _index(groups: Iterable[Group]) -> _Index:
    found: _Index = {}
    for group in groups:
        for key, over in group.keys:
            found.setdefault(key, []).append((group, over))
    return found


def _matching_groups(rows: list[Group], columns: list[Group]) -> tuple[list[Group], list[Group]]:
    """Splits groups by numbers that count something else where they fit nothing as they are."""
    while True:
        lonely = _lonely(rows, columns), _lonely(columns, rows)
        splits = [
            *_splits(lonely[0], columns, lonely[1], rows),
            *_splits(lonely[1], rows, lonely[0], columns),
        ]
        if not splits:
            break
        _, groups, group, parts = max(splits, key=lambda split: split[0])
        at = groups.index(group)
        groups[at : at + 1] = parts
    return rows, columns


def _lonely(groups: Sequence[Group], others: Sequence[Group]) -> list[Group]:
    index = _index(others)
    return [group for group in groups if next(_fits_of(group, index), None) is None]


def _fits_of(group: Group, index: _Index) -> Iterator[Group]:
    """Yields the groups of an index that a group can match."""
    for key, over in group.keys:
        for other, theirs in index.get(key, ()):
            if _match(group, over, other, theirs):
                yield other


def _match(
    a: Group, over: tuple[int, ...], b: Group, theirs: tuple[int, ...], *, names: bool = True
) -> Match | None:
    """Returns how two groups match, if their names do not contradict each other."""
    if (over and theirs) or (names and a.words.contradicts(b.words)):
        return None
    return match_of(b, a, theirs, back=True) if theirs else match_of(a, b, over, back=False)


def _splits(
    groups: Sequence[Group], others: Sequence[Group], lonely: Sequence[Group], all_of: list[Group]
) -> Iterator[tuple[tuple[int, int, int], list[Group], Group, list[Group]]]:
    """Yields the splits of groups after which parts fit others, with how much they fit."""
    index = _index(others)
    unmatched = {*lonely}
    modules: dict[object, set[str]] = defaultdict(set)  # below each number
    for group in all_of:
        for slot in range(group.slots):
            inner = "{}".join(group.pieces[slot + 1 :])
            modules[group.pieces[: slot + 1]].add(inner.rpartition(".")[0])
    for group in groups:
        for slot in range(group.slots):
            if len(modules[group.pieces[: slot + 1]]) > 1:
                continue  # a block of several modules is one of equal layers
            parts = [*group.split(slot)]
            if 1 < len(parts) <= FEW:
                met = {other for part in parts for other in _fits_of(part, index)}
                if met & unmatched or len(met) >= len(parts):
                    score = len(met & unmatched), len(group.members), slot
                    yield score, all_of, group, parts


def _alone(group: Group) -> list[Group]:
    while group.slots and len(group.members) <= FEW:
        return [part for inner in group.split(group.slots - 1) for part in _alone(inner)]
    return [group]


class _Assigner:
    """The state of an assignment: what is open on both sides, and what could be matched."""

    def __init__(self, rows: list[Group], columns: list[Group], roles: Roles | None) -> None:
        self._roles = roles
        self.roles: dict[tuple[Group, Group], bool | None] = {}
        self.rows, self.columns = dict.fromkeys(rows), dict.fromkeys(columns)
        self.possible: dict[Group, dict[Group, Match]] = defaultdict(dict)
        self.decisions: list[Decision] = []
        self.parents: dict[str, set[str]] = defaultdict(set)
        self._weights = Counter(word for g in (*rows, *columns) for word in g.words.path)
        index = _index(columns)
        for row in rows:
            for key, over in row.keys:
                for column, theirs in index.get(key, ()):
                    match = _match(row, over, column, theirs, names=roles is None)
                    if match is None:
                        continue
                    agree = None if roles is None else roles.agree(match)
                    contradicts = row.words.contradicts(column.words)
                    if agree or (agree is None and not contradicts):
                        self.possible[row].setdefault(column, match)
                        self.roles[row, column] = agree
        self._fits = Counter(group for pair in self.roles for group in pair)

    def run(self) -> Assignment:
        """Decides what is sure, then proposes the rest."""
        self._settle()
        while self._join(sure=True) or self._learn_layouts():
            self._settle()
        while self._join(sure=False, lonely=True):
            pass
        self._propose()
        while self._join(sure=False):
            pass
        self._propose_despite_names()
        self._learn_layouts()
        return Assignment(self.decisions, [*self.rows], [*self.columns])

    # what is sure

    def _settle(self) -> None:
        while True:
            found = [*self._sure_pairs()]
            wide = [pair for pair in found if len(pair[0].shapes[0]) > 1]
            for row, column in wide or found:  # biases and scales belong to what is beside them
                if row in self.rows and column in self.columns:
                    self._decide(self.possible[row][column], sure=True)
            if not found:
                return

    def _decide(self, match: Match, *, sure: bool, others: Iterable[Match] = ()) -> None:
        for group in match.sources:
            del self.rows[group]
        for group in match.targets:
            del self.columns[group]
        for source in match.sources:
            for target in match.targets:
                self.parents[source.parent].add(target.parent)
        option = match.options[0]
        witnesses = [SHAPES]
        if any(s.words.all() & t.words.all() for s in match.sources for t in match.targets):
            witnesses.insert(0, NAMES)
        if all(g.entries[0].layout for g in (*match.sources, *match.targets)):
            witnesses.append(LAYERS)
        if self.roles.get((match.sources[0], match.targets[0])):
            witnesses.append(ROLE)
        self.decisions.append(Decision(match, option, sure, tuple(witnesses), [*others]))

    def _open(self) -> tuple[dict[Group, list[Group]], dict[Group, list[Group]]]:
        """Returns for each open group what it can become, within the module that is known."""
        of_row: dict[Group, list[Group]] = {}
        of_column: dict[Group, list[Group]] = {column: [] for column in self.columns}
        claimed = {parent: p for p, found in self.parents.items() for parent in found}
        for row in self.rows:
            columns = [column for column in self.possible[row] if column in self.columns]
            inside = [c for c in columns if c.parent in self.parents.get(row.parent, ())]
            if not inside:
                inside = [c for c in columns if claimed.get(c.parent, row.parent) == row.parent]
            of_row[row] = inside or columns
            for column in of_row[row]:
                of_column[column].append(row)
        return of_row, of_column

    def _sure_pairs(self) -> Iterator[tuple[Group, Group]]:
        for (row, column), agree in self.roles.items():
            is_open = row in self.rows and column in self.columns
            if agree and is_open and not row.words.contradicts(column.words):
                yield row, column
        of_row, of_column = self._open()
        for row, columns in of_row.items():
            for column in columns:
                if self._is_sure(row, column, of_column[column], columns):
                    yield row, column
                    break

    def _is_sure(
        self, row: Group, column: Group, rows: Sequence[Group], columns: Sequence[Group]
    ) -> bool:
        if row.words.contradicts(column.words):
            return False
        if len(rows) == len(columns) == 1:
            return self._agree(row, column)
        mine, theirs = _distinctive(row, rows), _distinctive(column, columns)
        if len(rows) == len(columns) == 2 and _is_pair(rows) and _is_pair(columns):
            return _place(row, rows) == _place(column, columns) is not None
        if (mine ^ theirs) & PLACES or not mine & theirs:
            return False
        shared = mine & theirs
        others = [mine & _distinctive(other, columns) for other in columns if other is not column]
        others += [theirs & _distinctive(other, rows) for other in rows if other is not row]
        return all(shared > other for other in others)

    def _agree(self, row: Group, column: Group) -> bool:
        """Returns whether a pair that alone is left by its shapes has a second witness.

        That is a word of both names, a module that is known, or that nothing ever had such shapes.
        """
        mine, theirs = row.words, column.words
        if row.pattern == column.pattern or (mine.path & theirs.path) - {"norm"}:
            return True
        if not mine.leaf or mine.leaf != theirs.leaf:
            return False
        inside = column.parent in self.parents.get(row.parent, ())
        return inside or self._fits[row] == self._fits[column] == 1

    # what is joined or split

    def _join(self, *, sure: bool, lonely: bool = False) -> bool:
        """Decides one match of several groups with one; returns whether there was any.

        Args:
            sure: Whether names must list the parts.
            lonely: Whether the one must fit nothing else.
        """
        rows, columns = [*self.rows], [*self.columns]
        if lonely:
            rows, columns = _lonely(rows, columns), _lonely(columns, rows)
        found = [
            match
            for ones, many, back in (
                (columns, self.rows, False),
                (rows, self.columns, True),
            )
            for one in ones
            for match in joins(
                [g for g in many if self._may_be_part(g, one)],
                one,
                back=back,
            )
        ]
        if self._roles is not None:
            found = [match for match in found if self._roles.agree(match) is not False]
        named = [match for match in found if _names_parts(match)]
        if not sure and not named:
            named = [max(found, key=self._closeness)] if found else []
        if not named:
            return False
        best = max(named, key=self._closeness)
        self._decide(best, sure=sure, others=[m for m in found if m is not best])
        return True

    def _may_be_part(self, group: Group, one: Group) -> bool:
        if self._roles is not None and self._roles.is_part(
            group.entries[0].name, one.entries[0].name
        ):
            return True
        return not group.words.contradicts(one.words) or _is_part(group, one)

    def _closeness(self, match: Match) -> float:
        pairs = [(s, t) for s in match.sources for t in match.targets]
        return sum(self._score(s, t) for s, t in pairs) / len(pairs)

    # what is proposed

    def _score(self, row: Group, column: Group) -> float:
        mine, theirs = row.words, column.words
        weight = {word: 1 / self._weights[word] for word in mine.path | theirs.path}
        shared = sum(weight[word] for word in mine.path & theirs.path)
        total = sum(weight.values()) or 1.0
        inside = column.parent in self.parents.get(row.parent, ())
        return shared / total + (mine.leaf == theirs.leaf) + inside

    def _propose(self) -> None:
        """Proposes the closest pairs of what is open; none of them is sure."""
        of_row, of_column = self._open()
        pairs = sorted(
            ((self._score(row, c), -i, row, c)
             for i, (row, columns) in enumerate(of_row.items()) for c in columns),
            key=lambda item: item[:2], reverse=True,
        )  # fmt: skip
        for _, _, row, column in pairs:
            if row in self.rows and column in self.columns:
                others = [self.possible[row][c] for c in of_row[row] if c is not column]
                others += [self.possible[r][column] for r in of_column[column] if r is not row]
                self._decide(self.possible[row][column], sure=False, others=others)

    def _propose_despite_names(self) -> None:
        """Proposes pairs of what is left that fit by their sizes alone, whatever the names say."""
        index = _index(self.columns)
        for row in [*self.rows]:
            for key, over in row.keys:
                for column, theirs in index.get(key, ()):
                    if column not in self.columns or row not in self.rows:
                        continue
                    match = _match(row, over, column, theirs, names=False)
                    if match and (self._roles is None or self._roles.agree(match) is not False):
                        self._decide(match, sure=False)

    def _learn_layouts(self) -> bool:
        """Settles layouts by what those of the same kinds of layers have; returns if any were."""
        learnt: dict[object, set[object]] = defaultdict(set)
        for decision in self.decisions:
            if decision.settled and (kind := _layer_kind(decision.match)) is not None:
                learnt[kind].add(_steps(decision.option))
        changed = False
        for decision in self.decisions:
            option = _option_of_kind(decision.match, learnt)
            if option is not None and not decision.option.certain:
                decision.option, changed = option, True
                decision.witnesses = (*decision.witnesses, LAYERS)
        for matches in self.possible.values():
            for column, match in [*matches.items()]:
                option = _option_of_kind(match, learnt)
                kinds = learnt.get(_layer_kind(match), set())
                if len(kinds) == 1 and not any(_steps(o) in kinds for o in match.options):
                    del matches[column]
                    changed = True
                elif option is not None and (
                    len(match.options) > 1 or not match.options[0].certain
                ):
                    matches[column] = replace(match, options=(option,))
                    changed = True
        return changed


def _doubt_rotations(decisions: Sequence[Decision]) -> None:
    """Makes queries and keys unsure where positions may rotate them, in one of two orders."""
    if any(g.words.path & {"pos", "relative"} for d in decisions for g in _groups_of(d)):
        return
    if all(d.match.many[0].pieces == d.match.one.pieces for d in decisions):
        return  # of one implementation
    for decision in decisions:
        if any(g.words.path & {"q", "k", "qkv", "kv"} for g in _groups_of(decision)):
            _doubt(decision, rotations(decision.match))


def _doubt_flattenings(decisions: Sequence[Decision]) -> None:
    """Makes matrices unsure that take flattened images, which have channels first or last."""
    images = [d.match for d in decisions if min(len(g.shapes[0]) for g in _groups_of(d)) > 2]
    if all(group.shapes == m.one.shapes for m in images for group in m.many):
        return
    channels = {shape[at] for m in images for shape in m.one.shapes for at in (0, -1)}
    for decision in decisions:
        others = (g for d in decisions if d is not decision for g in _groups_of(d))
        sizes = {size for group in others for shape in group.shapes for size in shape}
        more = [*flattenings(decision.match, channels, sizes)]
        if more:
            _doubt(decision, more)


def _doubt(decision: Decision, more: Iterable[Option]) -> None:
    """Adds options to a decision, the layout of which is unsure then."""
    options = dict.fromkeys((decision.option, *decision.match.options, *more))
    decision.match = replace(decision.match, options=tuple(options))
    decision.option = replace(decision.option, certain=False)


def _groups_of(decision: Decision) -> tuple[Group, ...]:
    return (*decision.match.many, decision.match.one)


def _option_of_kind(match: Match, learnt: dict[object, set[object]]) -> Option | None:
    """Returns the option that layers of these kinds have; None where that is not known."""
    kinds = learnt.get(_layer_kind(match), set())
    options = [option for option in match.options if _steps(option) in kinds]
    return replace(options[0], certain=True) if len(kinds) == len(options) == 1 else None


def _distinctive(group: Group, rivals: Iterable[Group]) -> frozenset[str]:
    """Returns the words that not all rivals have; all words of a group that has none."""
    words = [other.words.path for other in rivals if other is not group]
    return group.words.path - (frozenset.intersection(*words) if words else frozenset())


def _is_pair(groups: Sequence[Group]) -> bool:
    """Returns whether two groups are the norms of a block."""
    a, b = groups
    return (
        all("norm" in group.words.path for group in groups)
        and a.pieces[:-1] == b.pieces[:-1]
        and {_place(a, groups), _place(b, groups)} == {0, 1}
    )


def _place(group: Group, groups: Sequence[Group]) -> int | None:
    """Returns whether a norm is the first or the second of two, by its name."""
    own = _distinctive(group, groups)
    numbers = sorted(
        int(word[1:]) for g in groups for word in _distinctive(g, groups) if word[0] == "#"
    )
    mine = [int(word[1:]) for word in own if word[0] == "#"]
    if mine and len(numbers) == 2:
        return numbers.index(mine[0])
    return place_of(own)


def _is_part(group: Group, one: Group) -> bool:
    same = group.words.leaf == one.words.leaf or not (group.words.leaf and one.words.leaf)
    return same and bool(group.words.path & one.words.path)


def _names_parts(match: Match) -> bool:
    """Returns whether the name of a group lists the parts that it is joined of."""
    words = match.one.words.path
    if "qkv" in words:
        words = words | {"q", "k", "v"}
    if "kv" in words:
        words = words | {"k", "v"}
    parts = [group.words.path & {"q", "k", "v", "gate", "up"} for group in match.many]
    return all(len(part) == 1 and part <= words for part in parts) and len(
        frozenset.union(*parts)
    ) == len(parts)


def _layer_kind(match: Match) -> object:
    """Returns the kinds of layer of both sides of a matrix; None for what is none."""
    groups = (match.many[0], match.one)
    if len(match.many) > 1 or min(len(g.shapes[0]) for g in groups) < 2:
        return None
    if any(g.words.path & {"embed", "token", "pos", "type", "head"} for g in groups):
        return None
    return (
        match.back,
        match.over,
        tuple(
            (g.layer or g.pieces[-1].rpartition(".")[2] or g.words.leaf, len(g.shapes[0]))
            for g in groups
        ),
    )


def _steps(option: Option) -> object:
    kinds = {kind_of(layout) for known in option.layouts for layout in known.values()}
    return option.axes, frozenset(kinds)
