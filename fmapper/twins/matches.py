"""The ways in which groups of parameters become others: one by one, stacked or joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, permutations, product
from typing import TypeAlias

from fmapper.twins.groups import Group, Shape
from fmapper.twins.layouts import Layout, Steps, layouts
from fmapper.twins.sides import Entry

Pair: TypeAlias = tuple[Shape, Shape]
# The order of equal blocks; or (before, outer, inner, after), of which two parts are exchanged.
Order: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

NAMES, SHAPES, LAYERS, ROLE, FUNCTION = "names", "shapes", "layers", "role", "function"
_FIRST, _LAST = "outputs first", "outputs last"
_MOST_PARTS = 4  # that one array is joined of: the gates of a recurrent cell
_PARTS = "q k v gate up ii if ig io hi hf hg ho ir iz in hr hz hn"
_ORDER = _PARTS.split()  # as most have them


@dataclass(frozen=True, eq=False)
class Option:
    """One way in which some groups become one.

    Attributes:
        layouts: For each group the layout by the shape that an array has and that it gets.
        axes: The dimensions of the numbers that are stacked, the outermost first.
        order: The order in which groups are joined.
        axis: The dimension along which they are joined.
        new: That dimension is a new one.
        certain: Conventions or shapes leave no other.
        after: The steps that follow where groups are joined.
    """

    layouts: tuple[dict[Pair, Layout], ...]
    axes: tuple[int, ...] = ()
    order: tuple[int, ...] = (0,)
    axis: int = 0
    new: bool = False
    certain: bool = False
    after: Steps = ()

    def __str__(self) -> str:
        words = [str(layout) for known in self.layouts[:1] for layout in known.values()][:1]
        if len(self.order) > 1:
            words.append(f"{'stack' if self.new else 'concatenate'} along {self.axis}")
        words += [f"stack along {axis}" for axis in self.axes]
        words += [str(Layout(self.after))] if self.after else []
        return ", ".join(filter(None, words))


@dataclass(frozen=True, eq=False)
class Match:
    """Groups of one side that can become a group of the other.

    Attributes:
        many: The groups, usually a single one.
        one: The group that they become.
        over: Which numbers of their names are dimensions of the other.
        back: The one is of the source, and the many of the target.
        options: The ways, the most likely first.
    """

    many: tuple[Group, ...]
    one: Group
    over: tuple[int, ...] = ()
    back: bool = False
    options: tuple[Option, ...] = field(default=())

    @cached_property
    def sources(self) -> tuple[Group, ...]:
        """The groups of the source."""
        return (self.one,) if self.back else self.many

    @cached_property
    def targets(self) -> tuple[Group, ...]:
        """The groups of the target."""
        return self.many if self.back else (self.one,)

    def rows(self) -> Iterator[tuple[list[list[Entry]], Entry]]:
        """Yields each array of the one, with the arrays of each of the many that it consists of."""
        blocks = [[*(group.without(self.over) or {}).values()] for group in self.many]
        for parts, entry in zip(zip(*blocks, strict=True), self.one.entries, strict=True):
            yield list(parts), entry


@dataclass(eq=False)
class Decision:
    """A match, and how it was found.

    Attributes:
        match: The match.
        option: The way that was chosen.
        sure: Whether nothing else could be meant.
        witnesses: Who agrees on it.
        others: The other matches that its groups could have.
        doubt: Why its layout is not sure; empty if names and shapes leave others, or none.
    """

    match: Match
    option: Option
    sure: bool
    witnesses: tuple[str, ...]
    others: list[Match] = field(default_factory=list)
    doubt: str = ""

    @property
    def pairs(self) -> list[tuple[Group, Group]]:
        """Each group of the source with each of the target."""
        return [*product(self.match.sources, self.match.targets)]

    @property
    def named(self) -> bool:
        """Whether names of both sides share a word that is not of all weights, or are equal."""
        return any(s.words.path & t.words.path or s.pattern == t.pattern for s, t in self.pairs)

    @property
    def settled(self) -> bool:
        """Whether both the groups and their layout are sure."""
        return self.sure and self.option.certain


def _convention(group: Group) -> str:
    return group.entries[0].layout


def match_of(
    group: Group, one: Group, over: tuple[int, ...] = (), *, back: bool, classes: bool = True
) -> Match | None:
    """Returns how a group can become another of as many elements; None if it cannot.

    Args:
        group: The group.
        one: The other.
        over: Which numbers of the first are dimensions of the other.
        back: Whether the other is of the source.
        classes: Whether the layouts are those of their layers.
    """
    a, b = (_convention(group), _convention(one)) if classes else ("", "")
    if ("float" in group.entries[0].dtype) != ("float" in one.entries[0].dtype):
        return None
    bare = Match((group,), one, over, back)
    pairs = list(dict.fromkeys((parts[0][0].shape, entry.shape) for parts, entry in bare.rows()))
    counts = [len({index[slot] for index in group.members}) for slot in over]
    options: list[Option] = []
    first_wanted = pairs[0][1]
    for axes in _stack_axes(first_wanted, counts):
        inner = [(shape, _remove_axes(wanted, axes, counts)) for shape, wanted in pairs]
        known = _common(a, b, inner)
        options += [
            Option((dict(zip(pairs, found, strict=True)),), axes, certain=certain)
            for found, certain in known
        ]
    if not options:
        return None
    if over and sum(option.certain for option in options) != 1:
        options = [_in_doubt(option) for option in options]
    return Match((group,), one, over, back, tuple(options))


def _in_doubt(option: Option) -> Option:
    return Option(option.layouts, option.axes, option.order, option.axis, option.new)


def _stack_axes(shape: Shape, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the dimensions that numbers can be, the outermost number first."""
    if not counts:
        yield ()
        return
    for axis, size in enumerate(shape):
        if size == counts[0]:
            rest = (*shape[:axis], *shape[axis + 1 :])
            for inner in _stack_axes(rest, counts[1:]):
                yield (axis, *inner)


def _remove_axes(shape: Shape, axes: Sequence[int], counts: Sequence[int]) -> Shape:
    for axis, count in zip(axes, counts, strict=True):
        if axis >= len(shape) or shape[axis] != count:
            return (-1,)
        shape = (*shape[:axis], *shape[axis + 1 :])
    return shape


def _common(a: str, b: str, pairs: Sequence[Pair]) -> list[tuple[list[Layout], bool]]:
    """Returns the layouts that all pairs of shapes can have, and whether there is no other."""
    every = [layouts(shape, wanted, a, b) for shape, wanted in pairs]
    if not all(every):
        return []
    by_kind = [{kind_of(layout): layout for layout in reversed(found)} for found in every]
    kinds = [kind_of(layout) for layout in every[0]]
    kinds = [kind for kind in kinds if all(kind in known for known in by_kind)]
    if not kinds:
        return [([found[0] for found in every], all(found[0].certain for found in every))]
    decided = any(found[0].certain for found in every)  # as by a kernel that is not square
    return [
        ([known[kind] for known in by_kind], decided and at == 0 and by_kind[0][kind] is not None)
        for at, kind in enumerate(_decided_first(kinds, every))
    ]


def _decided_first(kinds: list[object], every: Sequence[Sequence[Layout]]) -> list[object]:
    sure = [kind_of(found[0]) for found in every if found[0].certain]
    return sorted(kinds, key=lambda kind: kind not in sure)


def kind_of(layout: Layout) -> object:
    """Returns the steps of a layout without the sizes of reshapes."""
    return tuple(step[:2] if step[0] == "transpose" else step[:1] for step in layout.steps)


def other_layouts(match: Match) -> Iterator[Option]:
    """Yields the options of a match whose layers have other layouts than their classes say."""
    if len(match.many) == 1:
        found = match_of(match.many[0], match.one, match.over, back=match.back, classes=False)
        usual = [option.layouts for option in match.options]
        yield from (o for o in (found.options if found else ()) if o.layouts not in usual)


def join_groups(
    groups: Sequence[Group], one: Group, over: tuple[int, ...], *, back: bool
) -> Match | None:
    """Returns how several groups can be joined to another; None if they cannot.

    Args:
        groups: The groups.
        one: The other.
        over: Which number of their names is a dimension of the other, as that of experts.
        back: Whether the other is of the source.
    """
    ordered = sorted(groups, key=_order)
    options = [
        option
        for order in permutations(range(len(ordered)))
        for option in _ways_to_join_rows([ordered[at] for at in order], one, over, order)
    ]
    if not options:
        return None
    layer = one.entries[0].layer.rpartition(".")[2]
    if (
        layer in _IN_ORDER
        and "qkv" in one.words.path
        and len({option.axis for option in options}) == 1
    ):
        options[0] = Option(
            options[0].layouts, (), options[0].order, options[0].axis, options[0].new, certain=True
        )
    return Match(tuple(ordered), one, over, back, tuple(options))


# Layers that have queries, keys and values in this order.
_IN_ORDER = ("MultiheadAttention", "Conv1D")


def _order(group: Group) -> tuple[int, str]:
    found = [at for at, word in enumerate(_ORDER) if word in group.words.path]
    return (found[0] if found else len(_ORDER), group.name)


def _ways_to_join_rows(
    groups: Sequence[Group], one: Group, over: tuple[int, ...], order: tuple[int, ...]
) -> Iterator[Option]:
    """Yields the ways in which groups are parts of another, or of its rows along a dimension."""
    if not over:
        yield from _ways_to_join(groups, one, order)
        return
    counts = [len({index[slot] for index in groups[0].members}) for slot in over]
    blocks = [group.without(over) or {} for group in groups]
    firsts = [
        Group(group.pieces, {index: parts[0] for index, parts in block.items()})
        for group, block in zip(groups, blocks, strict=True)
    ]
    for axes in _stack_axes(one.shapes[0], counts):
        rows = {shape: _remove_axes(shape, axes, counts) for shape in one.shapes}
        row = Group(
            one.pieces, {i: replace(e, shape=rows[e.shape]) for i, e in one.members.items()}
        )
        wholes = {inner: shape for shape, inner in rows.items()}
        for option in _ways_to_join(firsts, row, order):
            known = tuple(
                {(shape, wholes[inner]): layout for (shape, inner), layout in layouts.items()}
                for layouts in option.layouts
            )
            yield replace(option, layouts=known, axes=axes)


def _ways_to_join(groups: Sequence[Group], one: Group, order: tuple[int, ...]) -> Iterator[Option]:
    """Yields the ways in which groups in an order are parts of another along a dimension."""
    shapes = [tuple(e.shape for e in group.entries) for group in groups]
    wholes = [entry.shape for entry in one.entries]
    b = _convention(one)
    for new, axis in product((False, True), range(len(wholes[0]))):
        found: list[list[dict[Pair, Layout]]] = []  # of each group, the layouts of its arrays
        for group, own in zip(groups, shapes, strict=True):
            pairs = list(dict.fromkeys(zip(own, wholes, strict=True)))
            inner = [(s, _part(s, w, axis, new=new, count=len(groups))) for s, w in pairs]
            known = _common(_convention(group), b, inner)
            found.append([dict(zip(pairs, way, strict=True)) for way, _ in known])
        for at in range(max(map(len, found)) if all(found) else 0):  # all parts in the same way
            by_group: list[dict[Pair, Layout]] = [{}] * len(groups)
            for place, ways in zip(order, found, strict=True):
                by_group[place] = ways[min(at, len(ways) - 1)]
            yield Option(tuple(by_group), (), order, axis, new)


def _part(shape: Shape, whole: Shape, axis: int, *, new: bool, count: int) -> Shape:
    """Returns the shape of a part of a whole; one that nothing fits if it is none."""
    if new:
        return (*whole[:axis], *whole[axis + 1 :]) if whole[axis] == count else (-1,)
    row = math.prod(whole) // whole[axis] if whole[axis] else 0
    if not row or math.prod(shape) % row:
        return (-1,)
    return (*whole[:axis], math.prod(shape) // row, *whole[axis + 1 :])


def joins(groups: Sequence[Group], one: Group, *, back: bool) -> Iterator[Match]:
    """Yields the ways in which some of the groups can be joined to another of all their elements.

    They are of one module, and are the same there: weights, or biases.
    """
    sizes = [math.prod(shape) for shape in one.shapes]
    by_module: dict[tuple[str, str, tuple[int, ...]], list[tuple[Group, list[int]]]] = {}
    for group in groups:
        module = group.parent.rpartition(".")[0]
        for over in group.removals():
            rest = group.without(over) if len(over) < 2 else None
            if rest is not None and len(rest) == len(sizes):
                parts = [sum(math.prod(entry.shape) for entry in row) for row in rest.values()]
                key = (module, group.words.leaf, over)
                by_module.setdefault(key, []).append((group, parts))
    for (_, leaf, over), found in by_module.items():
        if (leaf and one.words.leaf and leaf != one.words.leaf) or len(found) > 16:
            continue
        for count in range(2, _MOST_PARTS + 1):
            for chosen in combinations(found, count):
                if [*map(sum, zip(*(parts for _, parts in chosen), strict=True))] == sizes:
                    match = join_groups([group for group, _ in chosen], one, over, back=back)
                    if match is not None:
                        yield match


# --- the order of the elements of one dimension ---------------------------------------------------


def _after(match: Match, option: Option, steps_of: Callable[[Shape], Steps]) -> Option:
    """Returns an option of a match with steps for each shape before its own."""
    known = {
        pair: Layout((*steps_of(pair[0]), *layout.steps))
        for pair, layout in option.layouts[0].items()
    }
    return Option((known,), option.axes)


def flips(match: Match) -> Iterator[Option]:
    """Yields the options of a match of kernels with their space in the reverse order.

    That is what a transposed convolution and the convolution of a dilated image differ in.
    """
    shape = match.many[0].shapes[0]
    if len(match.many) > 1 or match.over or min(len(shape), len(match.one.shapes[0])) < 3:
        return
    space = range(len(shape) - 2) if _convention(match.many[0]) == _LAST else range(2, len(shape))

    def steps_of(shape: Shape) -> Steps:
        return tuple(
            ("blocks", tuple(reversed(range(shape[axis]))), axis)
            for axis in space
            if shape[axis] > 1
        )

    if any(map(steps_of, match.many[0].shapes)):
        for option in (*match.options, *other_layouts(match)):
            yield _after(match, option, steps_of)


def offsets(match: Match) -> Iterator[Option]:
    """Yields the options of a match with one added to the weights, or subtracted.

    Some norms multiply by one more than their weights, which are zeros at first.
    """
    if len(match.many) == 1 and all(len(shape) == 1 for shape in match.many[0].shapes):
        for value in (1.0, -1.0):
            yield _after(match, match.options[0], lambda _, by=value: (("offset", by),))  # type: ignore[misc]


def orders(size: int, sizes: Container[int]) -> Iterator[Order]:
    """Yields the orders that another implementation may have the elements of a dimension in.

    Those are the blocks of gates, or of queries with keys and values; the parts of each head, and
    the heads; images that are flattened; and the halves of each head that positions rotate, which
    are neighbours elsewhere.

    Args:
        size: The size of the dimension.
        sizes: The sizes that blocks may have.
    """
    for count in (2, 3, 4):
        if size % count == 0 and size // count in sizes:
            yield from (
                (order, ()) for order in permutations(range(count)) if [*order] != sorted(order)
            )
    for outer, inner in product(range(2, size // 2 + 1), repeat=2):
        rest, left = divmod(size, outer * inner)
        if not left and rest:
            yield (), (1, outer, inner, rest)
            if rest > 1 and 2 in (outer, inner):
                yield (), (rest, outer, inner, 1)


def reorder(match: Match, option: Option, axis: int, order: Order) -> Option:
    """Returns an option of a match with the elements of a dimension in another order."""
    blocks, parts = order

    def steps_of(shape: Shape) -> Steps:
        if blocks:
            return (("blocks", blocks, axis),)
        outer, inner = len(shape[:axis]) + 1, len(shape[:axis]) + 2
        split = (*shape[:axis], *parts, *shape[axis + 1 :])
        axes = [*range(len(split))]
        axes[outer], axes[inner] = inner, outer
        turned = tuple(split[at] for at in axes)
        return (("reshape", split, shape), ("transpose", tuple(axes)), ("reshape", shape, turned))

    if len(match.many) > 1:
        return replace(option, after=steps_of(match.one.shapes[0]))
    return _after(match, option, steps_of)


def dimension_like(match: Match, other: Match, axis: int) -> int | None:
    """Returns the dimension of a match that has the order of one of another; None for none.

    Vectors have that of the outputs of matrices.
    """
    group, lead = (one.one if len(one.many) > 1 else one.many[0] for one in (match, other))
    shape, size = group.shapes[0], lead.shapes[0][axis]
    if len({*group.shapes}) > 1 or (len(match.many) > 1 and match.over):
        return None
    layout = _convention(lead)
    outputs = {_FIRST: 0, _LAST: len(lead.shapes[0]) - 1}.get(layout, axis)
    if len(shape) == 1:
        at = 0 if axis == outputs else None
    else:
        at = axis if _convention(group) == layout and len(shape) == len(lead.shapes[0]) else None
    return at if at is not None and shape[at] == size else None
