"""The ways in which groups of parameters become others: one by one, stacked or joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, permutations, product
from typing import TYPE_CHECKING, TypeAlias

from fmapper.checkpoints.lazy import LazyArray, concatenate, stack
from fmapper.twins.groups import Group
from fmapper.twins.layouts import Layout, Shape, Steps, layouts
from fmapper.twins.sides import Entry

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules

Pair: TypeAlias = tuple[Shape, Shape]

NAMES, SHAPES, LAYERS, ROLE, FUNCTION = "names", "shapes", "layers", "role", "function"
_MOST_PARTS = 4  # that one array is joined of: the gates of a recurrent cell
_PARTS = "q k v gate up ii if ig io hi hf hg ho ir iz in hr hz hn"
_ORDER = _PARTS.split()  # as most have them


@dataclass(frozen=True, eq=False)
class Option:
    """One way in which some groups become one."""

    layouts: tuple[dict[Pair, Layout], ...]  # of each group, by the shape it has and that it gets
    axes: tuple[int, ...] = ()  # of the numbers that are stacked, the outermost first
    order: tuple[int, ...] = (0,)  # in which groups are joined
    axis: int = 0  # along which they are joined
    new: bool = False  # that dimension is a new one
    certain: bool = False  # conventions or shapes leave no other
    after: Steps = ()  # that follow where groups are joined

    def __str__(self) -> str:
        words = [str(layout) for layouts in self.layouts[:1] for layout in layouts.values()][:1]
        if len(self.order) > 1:
            words.append(f"{'stack' if self.new else 'concatenate'} along {self.axis}")
        words += [f"stack along {axis}" for axis in self.axes]
        words += [str(Layout(self.after))] if self.after else []
        return ", ".join(filter(None, words))


@dataclass(frozen=True, eq=False)
class Match:
    """Groups of one side that can become a group of the other."""

    many: tuple[Group, ...]  # usually a single one
    one: Group
    over: tuple[int, ...] = ()  # which numbers of their names are dimensions of the other
    back: bool = False  # the one is of the source, and the many of the target
    options: tuple[Option, ...] = ()  # the most likely first

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of both sides."""
        return (*self.many, self.one)

    @cached_property
    def sources(self) -> tuple[Group, ...]:
        """The groups of the source."""
        return (self.one,) if self.back else self.many

    @cached_property
    def targets(self) -> tuple[Group, ...]:
        """The groups of the target."""
        return self.many if self.back else (self.one,)

    @property
    def pairs(self) -> list[tuple[Group, Group]]:
        """Each group of the source with each of the target."""
        return [*product(self.sources, self.targets)]

    @cached_property
    def used(self) -> list[Entry]:
        """The arrays of the source."""
        return [entry for group in self.sources for entry in group.entries]

    @cached_property
    def filled(self) -> list[Entry]:
        """The arrays of the target."""
        return [entry for group in self.targets for entry in group.entries]

    def rows(self) -> Iterator[tuple[list[list[Entry]], Entry]]:
        """Yields each array of the one, with the arrays of each of the many that it consists of."""
        blocks = [[*(group.without(self.over) or {}).values()] for group in self.many]
        for parts, entry in zip(zip(*blocks, strict=True), self.one.entries, strict=True):
            yield list(parts), entry

    @cached_property
    def lists_parts(self) -> bool:
        """Whether the name of the one lists the parts that it is joined of."""
        words = self.one.words.path
        if "qkv" in words:
            words = words | {"q", "k", "v"}
        if "kv" in words:
            words = words | {"k", "v"}
        parts = [group.words.path & {"q", "k", "v", "gate", "up"} for group in self.many]
        named = all(len(part) == 1 and part <= words for part in parts)
        return named and len(frozenset.union(*parts)) == len(parts)

    def is_beside(self, other: Match) -> bool:
        """Returns whether two matches are of the same modules, such as weights and biases."""
        parents = [[group.parent for group in match.groups] for match in (self, other)]
        return parents[0] == parents[1]


@dataclass(eq=False)
class Decision:
    """A match, and how it was found."""

    match: Match
    option: Option
    sure: bool  # nothing else could be meant
    witnesses: tuple[str, ...]
    others: list[Match] = field(default_factory=list)  # that its groups could have
    doubt: str = ""  # why it is not sure; empty if names and shapes leave others, or none

    @property
    def named(self) -> bool:
        """Whether names of both sides share a word, are equal, or one lists the others."""
        same = (s.words.path & t.words.path or s.pattern == t.pattern for s, t in self.match.pairs)
        return self.match.lists_parts or any(same)

    @property
    def settled(self) -> bool:
        """Whether both the groups and their layout are sure."""
        return self.sure and self.option.certain


def match_of(
    groups: Sequence[Group],
    one: Group,
    over: tuple[int, ...] = (),
    *,
    back: bool,
    classes: bool = True,
) -> Match | None:
    """Returns how groups can become another of as many elements; None if they cannot.

    Several are joined; layouts are those of their layers, unless `classes` says not to ask these.
    """
    if any(("float" in g.entries[0].dtype) != ("float" in one.entries[0].dtype) for g in groups):
        return None
    bare = Match(tuple(sorted(groups, key=_place)), one, over, back)
    rows = [*bare.rows()]
    counts = [len({index[slot] for index in groups[0].members}) for slot in over]
    options: list[Option] = []
    for axes in _stack_axes(one.shapes[0], counts):
        inner = {shape: _remove_axes(shape, axes, counts) for shape in one.shapes}
        joins = [(False, 0)]
        if len(groups) > 1:
            joins = [*product((False, True), range(len(inner[one.shapes[0]])))]
        for order, (new, axis) in product(permutations(range(len(groups))), joins):
            ways: list[list[tuple[dict[Pair, Layout], bool]]] = []  # of each group
            for at, group in enumerate(bare.many):
                pairs = [*dict.fromkeys((parts[at][0].shape, e.shape) for parts, e in rows)]
                wanted = [(s, inner[whole]) for s, whole in pairs]
                if len(groups) > 1:
                    wanted = [(s, _part(s, w, axis, len(groups) * new)) for s, w in wanted]
                a, b = (g.entries[0].layout if classes else "" for g in (group, one))
                common = _common(a, b, wanted)
                ways.append([(dict(zip(pairs, way, strict=True)), sure) for way, sure in common])
            for at in range(max(map(len, ways)) if all(ways) else 0):  # all parts in the same way
                chosen = [way[min(at, len(way) - 1)] for way in ways]
                certain = len(groups) == 1 and chosen[0][1]
                layouts = tuple(layout for layout, _ in chosen)
                options.append(Option(layouts, axes, order, axis, new, certain))
    if over and sum(option.certain for option in options) != 1:
        options = [replace(option, certain=False) for option in options]
    return replace(bare, options=tuple(options)) if options else None


def _place(group: Group) -> tuple[int, str]:
    """Returns where most have a part among the others."""
    places = [at for at, word in enumerate(_ORDER) if word in group.words.path]
    return (places[0] if places else len(_ORDER), group.name)


def _stack_axes(shape: Shape, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the dimensions that numbers can be, the outermost number first."""
    if not counts:
        yield ()
        return
    for axis, size in enumerate(shape):
        if size == counts[0]:
            for inner in _stack_axes(shape[:axis] + shape[axis + 1 :], counts[1:]):
                yield (axis, *inner)


def _remove_axes(shape: Shape, axes: Sequence[int], counts: Sequence[int]) -> Shape:
    for axis, count in zip(axes, counts, strict=True):
        if axis >= len(shape) or shape[axis] != count:
            return (-1,)
        shape = shape[:axis] + shape[axis + 1 :]
    return shape


def _part(shape: Shape, whole: Shape, axis: int, count: int) -> Shape:
    """Returns the shape of a part of a whole, one of `count` if stacked; (-1,) if none fits."""
    rest, row = whole[:axis] + whole[axis + 1 :], math.prod(whole[:axis] + whole[axis + 1 :])
    if count:
        return rest if whole[axis] == count else (-1,)
    if not whole[axis] or not row or math.prod(shape) % row:
        return (-1,)
    return (*whole[:axis], math.prod(shape) // row, *whole[axis + 1 :])


def _common(a: str, b: str, pairs: Sequence[Pair]) -> list[tuple[list[Layout], bool]]:
    """Returns the layouts that all pairs of shapes can have, and whether there is no other."""
    every = [layouts(shape, wanted, a, b) for shape, wanted in pairs]
    if not all(every):
        return []
    by_kind = [{layout.kind: layout for layout in reversed(ways)} for ways in every]
    kinds = [x.kind for x in every[0] if all(x.kind in by_name for by_name in by_kind)]
    if not kinds:
        return [([ways[0] for ways in every], all(ways[0].certain for ways in every))]
    sure = {ways[0].kind for ways in every if ways[0].certain}  # as by a kernel of other sizes
    kinds.sort(key=lambda kind: kind not in sure)
    return [
        ([by_name[kind] for by_name in by_kind], at == 0 and kind in sure)
        for at, kind in enumerate(kinds)
    ]


def other_layouts(match: Match) -> Iterator[Option]:
    """Yields the options of a match whose layers have other layouts than their classes say."""
    if len(match.many) == 1:
        other = match_of(match.many, match.one, match.over, back=match.back, classes=False)
        usual = [option.layouts for option in match.options]
        yield from (o for o in (other.options if other else ()) if o.layouts not in usual)


def joins(groups: Sequence[Group], one: Group, *, back: bool) -> Iterator[Match]:
    """Yields the ways in which weights, or biases, of one module can be joined to a group."""
    sizes = [math.prod(shape) for shape in one.shapes]
    by_module: dict[tuple[str, str, tuple[int, ...]], list[tuple[Group, tuple[int, ...]]]] = {}
    for group in groups:
        module = group.parent.rpartition(".")[0]
        for parts, over in group.keys:
            if len(over) < 2 and len(parts) == len(sizes):
                by_module.setdefault((module, group.words.leaf, over), []).append((group, parts))
    for (_, leaf, over), found in by_module.items():
        if (leaf and one.words.leaf and leaf != one.words.leaf) or len(found) > 16:
            continue
        for count in range(2, _MOST_PARTS + 1):
            for chosen in combinations(found, count):
                if [*map(sum, zip(*(parts for _, parts in chosen), strict=True))] == sizes:
                    match = match_of([group for group, _ in chosen], one, over, back=back)
                    if match is not None:
                        yield match


def make(decisions: Iterable[Decision], arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Makes the arrays of the target of those of the source."""
    made: dict[str, LazyArray] = {}
    for decision in decisions:
        match = decision.match
        if match.back:
            there = derive(match.filled, partial(_join_all, decision))
            made |= there.inverse().apply({entry.name: arrays[entry.name] for entry in match.used})
        else:
            made |= _join_all(decision, arrays)
    return made


def _join_all(decision: Decision, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    made = {}
    for parts, entry in decision.match.rows():
        shapes = [[part.shape for part in group] for group in parts]
        blocks = [[arrays[part.name] for part in group] for group in parts]
        made[entry.name] = _join(blocks, decision.option, shapes, entry.shape)
    return made


def _join(
    pieces: list[list[LazyArray]], option: Option, shapes: list[list[Shape]], shape: Shape
) -> LazyArray:
    """Joins the arrays of several groups, each a list by the numbers that are stacked."""
    rows = [
        [option.layouts[at][shapes[at][row], shape].apply(x) for at, x in enumerate(parts)]
        for row, parts in enumerate(zip(*pieces, strict=True))
    ]
    if len(pieces) == 1:
        return _stack([row[0] for row in rows], option.axes, shape)
    join = stack if option.new else concatenate
    joined = (join([row[at] for at in option.order], option.axis) for row in rows)
    return _stack([*map(Layout(option.after).apply, joined)], option.axes, shape)


def _stack(arrays: Sequence[LazyArray], axes: tuple[int, ...], shape: Shape) -> LazyArray:
    if not axes:
        return arrays[0]
    axis, *inner = axes
    size = len(arrays) // shape[axis]
    rest = shape[:axis] + shape[axis + 1 :]
    blocks = (arrays[at : at + size] for at in range(0, len(arrays), size))
    return stack([_stack(block, tuple(inner), rest) for block in blocks], axis)


def rules_of(decisions: Sequence[Decision]) -> Rules:
    """Returns the rules for the arrays of some decisions alone."""
    return derive([e for d in decisions for e in d.match.used], lambda x: make(decisions, x))


def derive(
    entries: Iterable[Entry], change: Callable[[dict[str, LazyArray]], Mapping[str, LazyArray]]
) -> Rules:
    """Returns the rules for what a function does with arrays."""
    from fmapper.checkpoints.recording.abstract import Named
    from fmapper.checkpoints.recording.record import derive_rules
    from fmapper.files.dtypes import numpy_dtype

    named: dict[str, LazyArray] = {
        e.name: Named(e.name, e.shape, numpy_dtype(e.dtype)) for e in entries
    }
    return derive_rules(change(named), [*named])
