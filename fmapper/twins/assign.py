"""The assignment of the groups of two models by their names, shapes, layers and roles.

A pair is sure if two witnesses agree on it and nothing else could be meant. The rest is proposed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from fmapper.twins.groups import Group, groups_of
from fmapper.twins.matches import LAYERS, ROLE, SHAPES, Decision, Match, joins, match_of
from fmapper.twins.sides import Entry
from fmapper.twins.words import PLACES

if TYPE_CHECKING:
    from fmapper.twins.roles import Roles

# By sizes: the groups that have these, and over which numbers they are stacked then.
_Index: TypeAlias = dict[tuple[int, ...], list[tuple[Group, tuple[int, ...]]]]

FEW = 32  # numbers that may each be something else, rather than layers


def assign(
    sources: Iterable[Entry], targets: Iterable[Entry], roles: Roles | None = None
) -> list[Decision]:
    """Assigns the parameters of a source to those of a target, also by their roles if given."""
    rows, columns = groups_of(sources), groups_of(targets)
    while splits := [*_splits(rows, columns), *_splits(columns, rows)]:
        _, groups, group, parts = max(splits, key=lambda split: split[0])
        at = groups.index(group)
        groups[at : at + 1] = parts
    first = _Assigner(rows, columns, roles)
    decisions = first.run()
    sides = [[g for g in side if g in first.open] for side in (rows, columns)]
    if all(sides):
        left, right = ([part for g in side for part in _alone(g)] for side in sides)
        decisions += _Assigner(left, right, roles).run()
    _doubt_orders(decisions)
    return decisions


def _alone(group: Group) -> list[Group]:
    while group.slots and len(group.members) <= FEW:
        return [part for inner in group.split(group.slots - 1) for part in _alone(inner)]
    return [group]


def _splits(
    groups: list[Group], others: list[Group]
) -> Iterator[tuple[tuple[int, int, int], list[Group], Group, list[Group]]]:
    """Yields the splits of groups that fit nothing as they are, with how much the parts fit."""
    index, back = _index(others), _index(groups)
    unmatched = {other for other in others if not any(_fits_of(other, back))}
    modules: dict[object, set[str]] = defaultdict(set)  # below each number
    for group in groups:
        for slot in range(group.slots):
            inner = "{}".join(group.pieces[slot + 1 :])
            modules[group.pieces[: slot + 1]].add(inner.rpartition(".")[0])
    for group in groups:
        for slot in range(0 if any(_fits_of(group, index)) else group.slots):
            parts = [*group.split(slot)]
            if len(modules[group.pieces[: slot + 1]]) > 1 or not 1 < len(parts) <= FEW:
                continue  # a block of several modules is one of equal layers
            met = {other for part in parts for other in _fits_of(part, index)}
            if met & unmatched or len(met) >= len(parts):
                yield (len(met & unmatched), len(group.members), slot), groups, group, parts


def _index(groups: Iterable[Group]) -> _Index:
    index: _Index = {}
    for group in groups:
        for key, over in group.keys:
            index.setdefault(key, []).append((group, over))
    return index


def _fits_of(group: Group, index: _Index) -> Iterator[Group]:
    """Yields the groups of an index that a group can become, where names do not contradict."""
    for match in _matches(group, index):
        other = match.one if match.many[0] is group else match.many[0]
        if not group.words.contradicts(other.words):
            yield other


def _matches(group: Group, index: _Index) -> Iterator[Match]:
    for key, over in group.keys:
        for other, theirs in index.get(key, ()):
            if theirs and not over:
                match = match_of((other,), group, theirs, back=True)
            else:
                match = None if theirs else match_of((group,), other, over, back=False)
            if match is not None:
                yield match


class _Assigner:
    """The state of an assignment: which groups are open, and what could be matched."""

    def __init__(self, rows: list[Group], columns: list[Group], roles: Roles | None) -> None:
        self._roles = roles
        self._agrees: dict[Match, bool | None] = {}
        self.open = dict.fromkeys((*rows, *columns))
        self._pairs: dict[Group, dict[Group, Match]] = {row: {} for row in rows}
        self._decisions: list[Decision] = []
        self._parents: dict[str, set[str]] = defaultdict(set)
        self._weights = Counter(word for g in self.open for word in g.words.path)
        index = _index(columns)
        for row in rows:
            for match in _matches(row, index):
                if self._may_be(match):
                    self._pairs[row].setdefault(match.targets[0], match)
        self._joins = [
            match
            for wholes, many, back in ((columns, rows, False), (rows, columns, True))
            for whole in wholes
            for match in joins([g for g in many if self._may_be_part(g, whole)], whole, back=back)
            if self._may_be(match)
        ]
        self._fits = Counter(group for pair in self._open_pairs() for group in pair)

    def _may_be(self, match: Match) -> bool:
        self._agrees[match] = self._roles.agree(match) if self._roles else None
        return self._agrees[match] is not False

    def _may_be_part(self, group: Group, whole: Group) -> bool:
        parts = self._roles.parts.get(whole.entries[0].name, ()) if self._roles else ()
        return group.entries[0].name in parts or not group.words.contradicts(whole.words)

    def _open_pairs(self, *, despite_names: bool = False) -> Iterator[tuple[Group, Group]]:
        """Yields what can be paired where names do not contradict, or roles outweigh them."""
        for row, columns in self._pairs.items():
            for column, match in columns.items() if row in self.open else ():
                allowed = despite_names or not row.words.contradicts(column.words)
                if column in self.open and (allowed or self._agrees[match]):
                    yield row, column

    def run(self) -> list[Decision]:
        """Decides what is sure, then proposes the rest."""
        while self._settle() or self._decide_best(
            [m for m in self._joins if self._is_open(m) and m.lists_parts], sure=True
        ):
            pass
        while self._decide_best(self._lonely_joins(), sure=False) or self._decide_best(
            [self._pairs[r][c] for r, cs in self._open(despite_names=True).items() for c in cs],
            sure=False,
        ):
            pass
        return self._decisions

    def _open(self, *, despite_names: bool = False) -> dict[Group, list[Group]]:
        """Returns for each open group what it can become, by its role or in a known module."""
        claimed = {parent: p for p, parents in self._parents.items() for parent in parents}
        of_row: dict[Group, list[Group]] = defaultdict(list)
        for row, column in self._open_pairs(despite_names=despite_names):
            of_row[row].append(column)
        for row, columns in of_row.items():
            inside = self._parents.get(row.parent, ())
            choices = (
                [c for c in columns if self._agrees[self._pairs[row][c]]],
                [c for c in columns if c.parent in inside],
                [c for c in columns if claimed.get(c.parent, row.parent) == row.parent],
                columns,
            )
            of_row[row] = next(filter(None, choices))
        return of_row

    def _settle(self) -> bool:
        of_row = self._open()
        of_column: dict[Group, list[Group]] = defaultdict(list)
        for row, columns in of_row.items():
            for column in columns:
                of_column[column].append(row)
        sure = [
            self._pairs[row][column]
            for row, columns in of_row.items()
            for column in columns
            if self._is_sure(row, column, of_column[column], columns)
        ]
        wide = [match for match in sure if len(match.one.shapes[0]) > 1]
        for match in wide or sure:  # biases and scales belong to what is beside them
            if self._is_open(match):
                self._decide(match, sure=True)
        return bool(sure)

    def _is_sure(
        self, row: Group, column: Group, rows: Sequence[Group], columns: Sequence[Group]
    ) -> bool:
        """Returns whether roles agree, or both names have the words that tell them from rivals."""
        mine, theirs = row.words, column.words
        if mine.contradicts(theirs):
            return False
        if self._agrees[self._pairs[row][column]]:
            return True
        if len(rows) == len(columns) == 1:
            if row.pattern == column.pattern or (mine.path & theirs.path) - {"norm"}:
                return True
            inside = column.parent in self._parents.get(row.parent, ())
            alone = inside or self._fits[row] == self._fits[column] == 1
            return alone and bool(mine.leaf) and mine.leaf == theirs.leaf
        one, other = _distinctive(row, rows), _distinctive(column, columns)
        if (one ^ other) & PLACES or not one & other:
            return False
        rivals = [one & _distinctive(rival, columns) for rival in columns if rival is not column]
        rivals += [other & _distinctive(rival, rows) for rival in rows if rival is not row]
        return all(one & other > rival for rival in rivals)

    def _lonely_joins(self) -> list[Match]:
        """Returns the joins to what fits nothing else that is open; those that are named first."""
        fitting = {group for pair in self._open_pairs() for group in pair}
        lonely = [m for m in self._joins if self._is_open(m) and m.one not in fitting]
        return [match for match in lonely if match.lists_parts] or lonely

    def _is_open(self, match: Match) -> bool:
        return all(group in self.open for group in match.groups)

    def _decide_best(self, matches: Sequence[Match], *, sure: bool) -> bool:
        if not matches:
            return False
        best = max(matches, key=self._closeness)
        others = [m for m in matches if m is not best and {*best.groups} & {*m.groups}]
        self._decide(best, sure=sure, others=others)
        return True

    def _closeness(self, match: Match) -> float:
        """Returns how close names are; those that contradict each other come last."""
        score = 0.0
        for row, column in match.pairs:
            mine, theirs = row.words, column.words
            weight = {word: 1 / self._weights[word] for word in mine.path | theirs.path}
            shared = sum(weight[word] for word in mine.path & theirs.path)
            score += shared / (sum(weight.values()) or 1.0) + (mine.leaf == theirs.leaf)
            score += column.parent in self._parents.get(row.parent, ())
            score -= 9 * mine.contradicts(theirs)
        return score / len(match.pairs)

    def _decide(self, match: Match, *, sure: bool, others: Sequence[Match] = ()) -> None:
        for group in match.groups:
            del self.open[group]
        for source, target in match.pairs:
            self._parents[source.parent].add(target.parent)
        layers = all(g.entries[0].layout for g in match.groups)
        agreeing = ((SHAPES, True), (LAYERS, layers), (ROLE, self._agrees[match]))
        witnesses = tuple(witness for witness, agrees in agreeing if agrees)
        self._decisions.append(Decision(match, match.options[0], sure, witnesses, [*others]))


def _doubt_orders(decisions: Sequence[Decision]) -> None:
    """Makes layouts unsure where another implementation may have elements in another order."""
    groups = [g for d in decisions for g in d.match.groups]
    rotates = not any(g.words.path & {"pos", "relative"} for g in groups) and any(
        d.match.many[0].pieces != d.match.one.pieces for d in decisions
    )  # in two implementations
    images = [d.match for d in decisions if min(len(g.shapes[0]) for g in d.match.groups) > 2]
    channels = {shape[at] for m in images for shape in m.one.shapes for at in (0, -1)}
    if all(group.shapes == m.one.shapes for m in images for group in m.many):
        channels = set()  # in one framework
    for decision in decisions:
        mine = decision.match.groups
        if rotates and any(g.words.path & {"q", "k", "qkv", "kv"} for g in mine):
            decision.doubt = "positions may rotate halves of each head, or neighbours"
        elif channels:
            others = {n for g in groups if g not in mine for shape in g.shapes for n in shape}
            sizes = {n for shape in mine[0].shapes if len(shape) == 2 for n in shape} - others
            if any(size % n == 0 and 1 < n < size for size in sizes for n in channels):
                decision.doubt = "flattened images may have their channels first, or last"
        if decision.doubt:
            decision.option = replace(decision.option, certain=False)


def _distinctive(group: Group, rivals: Iterable[Group]) -> frozenset[str]:
    """Returns the words that not all rivals have; all words of a group that has none."""
    words = [other.words.path for other in rivals if other is not group]
    return group.words.path - (frozenset.intersection(*words) if words else frozenset())
