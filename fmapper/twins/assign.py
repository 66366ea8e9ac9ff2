"""The assignment of the groups of two models by their names, shapes and layers.

A pair is sure if names and shapes agree on it and nothing else could be meant. The rest is
proposed, with what else it could be, for the outputs of both models to decide.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from fmapper.twins.groups import Group, Shape, groups_of
from fmapper.twins.matches import (
    LAYERS,
    NAMES,
    ROLE,
    SHAPES,
    Decision,
    Match,
    joins,
    match_of,
)
from fmapper.twins.sides import Entry
from fmapper.twins.words import PLACES

if TYPE_CHECKING:
    from fmapper.twins.roles import Roles

# By counts and sizes: the groups that have these, and over which numbers they are stacked then.
_Index: TypeAlias = dict[tuple[int, tuple[int, ...]], list[tuple[Group, tuple[int, ...]]]]

FEW = 32  # numbers that may each be something else, rather than layers


def assign(
    sources: Iterable[Entry], targets: Iterable[Entry], roles: Roles | None = None
) -> list[Decision]:
    """Assigns the parameters of a source to those of a target, also by their roles if given."""
    rows, columns = _matching_groups(groups_of(sources), groups_of(targets))
    first = _Assigner(rows, columns, roles)
    decisions = first.run()
    if first.rows and first.columns:
        rows, columns = (
            [part for group in groups for part in _alone(group)]
            for groups in (first.rows, first.columns)
        )
        decisions += _Assigner(rows, columns, roles).run()
    _learn_layouts(decisions)
    _doubt_orders(decisions)
    return decisions


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
    return match_of((b,), a, theirs, back=True) if theirs else match_of((a,), b, over, back=False)


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
                    match = _match(row, over, column, theirs, names=False)
                    agree = roles.agree(match) if match and roles else None
                    if match and agree is not False:
                        self.possible[row].setdefault(column, match)
                        self.roles[row, column] = agree
        self._fits = Counter(group for pair in self.roles if self._allows(*pair) for group in pair)

    def _allows(self, row: Group, column: Group) -> bool:
        """Returns whether names do not contradict a pair, or roles outweigh them."""
        return bool(self.roles.get((row, column))) or not row.words.contradicts(column.words)

    def run(self) -> list[Decision]:
        """Decides what is sure, then proposes the rest."""
        while self._settle() or self._join(sure=True):
            pass
        while self._join(sure=False) or self._propose():
            pass
        return self.decisions

    # what is sure

    def _settle(self) -> bool:
        found = [*self._sure_pairs()]
        wide = [pair for pair in found if len(pair[0].shapes[0]) > 1]
        for row, column in wide or found:  # biases and scales belong to what is beside them
            if row in self.rows and column in self.columns:
                self._decide(self.possible[row][column], sure=True)
        return bool(found)

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

    def _open(
        self, *, despite_names: bool = False
    ) -> tuple[dict[Group, list[Group]], dict[Group, list[Group]]]:
        """Returns for each open group what it can become, within the module that is known."""
        of_row: dict[Group, list[Group]] = {}
        of_column: dict[Group, list[Group]] = {column: [] for column in self.columns}
        claimed = {parent: p for p, found in self.parents.items() for parent in found}
        for row in self.rows:
            columns = [
                column
                for column in self.possible[row]
                if column in self.columns and (despite_names or self._allows(row, column))
            ]
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

    def _join(self, *, sure: bool) -> bool:
        """Decides one match of several groups with one; returns whether there was any.

        Args:
            sure: Whether names must list the parts; else the one must fit nothing else.
        """
        rows, columns = [*self.rows], [*self.columns]
        if not sure:
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
        return shared / total + (mine.leaf == theirs.leaf) + inside - 9 * mine.contradicts(theirs)

    def _propose(self) -> bool:
        """Decides the closest pair of what is open, which is not sure; returns if there was any.

        Pairs whose names contradict each other come last.
        """
        of_row, of_column = self._open(despite_names=True)
        pairs = [(row, column) for row, columns in of_row.items() for column in columns]
        if not pairs:
            return False
        row, column = max(pairs, key=lambda pair: self._score(*pair))
        others = [self.possible[row][c] for c in of_row[row] if c is not column]
        others += [self.possible[r][column] for r in of_column[column] if r is not row]
        self._decide(self.possible[row][column], sure=False, others=others)
        return True


def _learn_layouts(decisions: Sequence[Decision]) -> None:
    """Settles the layouts of square matrices by those of others in the same kinds of layers."""
    learnt: dict[object, set[object]] = defaultdict(set)
    for decision in decisions:
        if decision.settled:
            learnt[_layer_kind(decision.match)].add(decision.option.kind)
    for decision in decisions:
        kinds = learnt.get(_layer_kind(decision.match), set())
        options = [option for option in decision.match.options if option.kind in kinds]
        if not decision.option.certain and len(kinds) == len(options) == 1:
            decision.option = replace(options[0], certain=True)
            decision.witnesses = (*decision.witnesses, LAYERS)


def _layer_kind(match: Match) -> object:
    """Returns the kinds of layer of both sides of a matrix; the match itself for others."""
    groups = (match.many[0], match.one)
    others = {"embed", "token", "pos", "type", "head"}
    if len(match.many) > 1 or any(len(g.shapes[0]) < 2 or g.words.path & others for g in groups):
        return match
    kinds = [(g.layer or g.pieces[-1].rpartition(".")[2], len(g.shapes[0])) for g in groups]
    return match.back, match.over, *kinds


def _doubt_orders(decisions: Sequence[Decision]) -> None:
    """Makes layouts unsure where another implementation may have elements in another order.

    Positions rotate halves of each head, or neighbours; images are flattened with their channels
    first, or last.
    """
    groups = [g for d in decisions for g in _groups_of(d)]
    rotates = not any(g.words.path & {"pos", "relative"} for g in groups) and any(
        d.match.many[0].pieces != d.match.one.pieces for d in decisions
    )  # in two implementations
    images = [d.match for d in decisions if min(len(g.shapes[0]) for g in _groups_of(d)) > 2]
    channels = {shape[at] for m in images for shape in m.one.shapes for at in (0, -1)}
    if all(group.shapes == m.one.shapes for m in images for group in m.many):
        channels = set()  # in one framework
    for decision in decisions:
        own = _groups_of(decision)
        if rotates and any(g.words.path & {"q", "k", "qkv", "kv"} for g in own):
            decision.doubt = "positions may rotate halves of each head, or neighbours"
        sizes = {
            n for g in groups if channels and g not in own for shape in g.shapes for n in shape
        }
        if any(_is_flat(shape, channels, sizes) for shape in own[0].shapes if channels):
            decision.doubt = "flattened images may have their channels first, or last"
        if decision.doubt:
            decision.option = replace(decision.option, certain=False)


def _is_flat(shape: Shape, channels: set[int], sizes: set[int]) -> bool:
    """Returns whether a matrix may take flattened images: so many inputs nothing else has."""
    return len(shape) == 2 and any(
        size not in sizes and any(size % n == 0 and 1 < n < size for n in channels)
        for size in shape
    )


def _groups_of(decision: Decision) -> tuple[Group, ...]:
    return (*decision.match.many, decision.match.one)


def _distinctive(group: Group, rivals: Iterable[Group]) -> frozenset[str]:
    """Returns the words that not all rivals have; all words of a group that has none."""
    words = [other.words.path for other in rivals if other is not group]
    return group.words.path - (frozenset.intersection(*words) if words else frozenset())


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
