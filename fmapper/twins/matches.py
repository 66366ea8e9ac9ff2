"""The ways in which groups of parameters become others: one by one, stacked or joined."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, permutations, product
from typing import TypeAlias

from fmapper.twins.groups import Group, Shape
from fmapper.twins.layouts import FIRST, LAST, Layout, Steps, layouts
from fmapper.twins.sides import Entry

Pair: TypeAlias = tuple[Shape, Shape]
# The order of equal blocks; or (before, outer, inner, after), of which two parts are exchanged.
Order: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

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
        """Whether names of both sides share a word that is not of all weights, or are equal."""
        return any(
            s.words.path & t.words.path or s.pattern == t.pattern for s, t in self.match.pairs
        )

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
    """Returns the shape of a part of a whole; one that nothing fits if there is none.

    Parts are joined along a dimension, in which `count` of them are stacked if that is not 0.
    """
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
                    match = match_of([group for group, _ in chosen], one, over, back=back)
                    if match is not None:
                        yield match


# --- the order of the elements of one dimension ---------------------------------------------------


def _after(match: Match, option: Option, steps: Mapping[Shape, Steps]) -> Option:
    """Returns an option of a match with steps for each shape before its own.

    It is as sure for vectors, which have the order of the matrices beside them.
    """
    extended = {
        pair: Layout((*steps[pair[0]], *layout.steps))
        for pair, layout in option.layouts[0].items()
        if pair[0] in steps
    }
    vectors = all(len(shape) == 1 for shape in match.many[0].shapes)
    return replace(option, layouts=(extended,), certain=option.certain and vectors)


def flips(match: Match) -> Iterator[Option]:
    """Yields the options of a match of kernels with their space in the reverse order.

    That is what a transposed convolution and the convolution of a dilated image differ in.
    """
    group, n = match.many[0], len(match.many[0].shapes[0])
    if len(match.many) > 1 or match.over or min(n, len(match.one.shapes[0])) < 3:
        return
    space = range(n - 2) if group.entries[0].layout == LAST else range(2, n)
    steps = {
        shape: tuple(("blocks", (*range(shape[at]),)[::-1], at) for at in space if shape[at] > 1)
        for shape in group.shapes
    }
    if any(steps.values()):
        for option in (*match.options, *other_layouts(match)):
            yield _after(match, option, steps)


def offsets(match: Match) -> Iterator[Option]:
    """Yields the options of a match with one added to the weights, or subtracted.

    Some norms multiply by one more than their weights, which are zeros at first.
    """
    shapes = match.many[0].shapes
    if len(match.many) == 1 and all(len(shape) == 1 for shape in shapes):
        for value in (1.0, -1.0):
            steps: Steps = (("offset", value),)
            yield _after(match, match.options[0], dict.fromkeys(shapes, steps))


def orders(size: int, sizes: Container[int], parts: int) -> Iterator[Order]:
    """Yields the orders that another implementation may have the elements of a dimension in.

    Those are the halves of each head that positions rotate, which are neighbours elsewhere; the
    blocks of gates, or of queries with keys and values; the parts of each head, and the heads; and
    images that are flattened. Blocks have some of the sizes; where several arrays are joined, their
    number is one of what is exchanged.
    """
    exchanges = [
        (outer, inner, size // (outer * inner))
        for outer, inner in product(range(2, size // 2 + 1), repeat=2)
        if size % (outer * inner) == 0
    ]
    if parts > 1:
        yield from (((), (1, *sizes)) for sizes in exchanges if parts in sizes[:2])
        return
    yield from (((), (rest, a, b, 1)) for a, b, rest in exchanges if 2 in (a, b))
    for count in (2, 3, 4):
        if size % count == 0 and size // count in sizes:
            every = permutations(range(count))
            yield from ((order, ()) for order in every if [*order] != sorted(order))
    yield from (((), (1, *sizes)) for sizes in exchanges if sizes[2] > 1 or 2 not in sizes)


def reorder(match: Match, option: Option, axis: int, order: Order) -> Option:
    """Returns an option of a match with the elements of a dimension in another order."""
    blocks, parts = order

    def steps_of(shape: Shape) -> Steps:
        if blocks:
            return (("blocks", blocks, axis),)
        split = (*shape[:axis], *parts, *shape[axis + 1 :])
        axes = [*range(len(split))]
        axes[axis + 1], axes[axis + 2] = axis + 2, axis + 1
        turned = tuple(split[at] for at in axes)
        return (("reshape", split, shape), ("transpose", tuple(axes)), ("reshape", shape, turned))

    if len(match.many) > 1:
        return replace(option, after=steps_of(match.one.shapes[0]))
    return _after(match, option, {shape: steps_of(shape) for shape in match.many[0].shapes})


def dimension_like(match: Match, other: Match, axis: int) -> int | None:
    """Returns the dimension of a match that has the order of one of another; None for none.

    Vectors have that of the outputs of matrices.
    """
    group, lead = (each.one if len(each.many) > 1 else each.many[0] for each in (match, other))
    shape, layout = group.shapes[0], lead.entries[0].layout
    if len({*group.shapes}) > 1 or (len(match.many) > 1 and match.over):
        return None
    at: int | None = None
    if len(shape) == 1:
        outputs = {FIRST: 0, LAST: len(lead.shapes[0]) - 1}.get(layout, axis)
        at = 0 if axis == outputs else None
    elif group.entries[0].layout == layout and len(shape) == len(lead.shapes[0]):
        at = axis
    return at if at is not None and shape[at] == lead.shapes[0][axis] else None
