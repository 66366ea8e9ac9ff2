"""The search for pairs and layouts with which both models compute the same."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, permutations, product
from typing import Any, TypeAlias

from fmapper.checkpoints.lazy import LazyArray
from fmapper.twins.assign import FEW
from fmapper.twins.groups import Group
from fmapper.twins.layouts import FIRST, LAST, Layout, Shape, Steps
from fmapper.twins.matches import FUNCTION, ROLE, Decision, Match, Option, match_of, other_layouts
from fmapper.twins.one_sided import Arrays, Change
from fmapper.twins.proof import Proof, Trial
from fmapper.twins.roles import Roles

# The order of equal blocks; or (before, outer, inner, after), of which two parts are exchanged.
Order: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class Search:
    """The decisions of an assignment while models are called with them."""

    proof: Proof
    decisions: list[Decision]
    make: Callable[[Sequence[Decision], Change], Arrays]  # the target's, with a change of them
    roles: Roles | None  # pairs that they contradict are not tried
    partial: bool = False  # some outputs depend on weights that are kept, and differ

    def run(self) -> str:
        """Changes the decisions until both models agree; what outputs depend on is sure then.

        Returns:
            Where they first differ, whatever is changed; empty if they agree.
        """
        if not self._trial(self.decisions).agrees and (problem := self._repair()):
            return problem
        self.partial = self._trial(self.decisions).partial
        for at, decision in enumerate(self.decisions):
            two = decision.settled and decision.named and ROLE in decision.witnesses
            if (two and not self.partial) or not self._is_blind(at, decision):
                decision.sure = True
                decision.option = replace(decision.option, certain=True)
                decision.witnesses = (*decision.witnesses, FUNCTION)
        proved = [d for d in self.decisions if FUNCTION in d.witnesses]
        for decision in self.decisions:  # the bias of keys has the order of their matrix
            order, match = decision.option.order, decision.match
            beside = any(d.option.order == order and d.match.is_beside(match) for d in proved)
            if beside and (decision.doubt or len(match.one.shapes[0]) == 1):
                decision.option = replace(decision.option, certain=True)
        return ""

    def _trial(self, decisions: Sequence[Decision], *, watch: bool = False) -> Trial:
        return self.proof.run(self.make(decisions, dict), watch=watch)

    def _repair(self) -> str:
        """Changes decisions, unsure ones first; returns where the outputs differ after all."""
        best = self._trial(self.decisions, watch=True)
        for stage in ("unsure", "all", "apart", "turned"):
            if stage == "apart":
                before = len(self.decisions)
                self.decisions[:] = [
                    part for decision in self.decisions for part in _apart(decision)
                ]
                if len(self.decisions) == before:
                    continue
            last = None
            while last != best[:2]:
                last = best[:2]
                for at, decision in enumerate(self.decisions):
                    if _is_near(decision, best) and not (stage == "unsure" and decision.settled):
                        best = self._improve(at, best, turn=stage == "turned")
                    if best.agrees:
                        return ""
        self.proof.check_target(self.make(self.decisions, dict))
        return (
            "both models give different outputs with the same weights, however these are paired. "
            f"The first difference is at {best.place or 'the output'} of the target. The "
            "architectures differ there, such as in an activation, an epsilon or a mask; or a pair "
            "was not found: pass it with rules="
        )

    def _improve(self, at: int, best: Trial, *, turn: bool) -> Trial:
        """Tries the other options of a decision, and others in its place; keeps the best."""
        current = [*self.decisions]
        ways = [] if turn else [self._alternatives(at, current)]
        if turn or not current[at].settled:
            ways.append(self._reorder(at, best, current, turn=turn))
        for changed in chain(*ways):
            trial = self._trial(changed, watch=True)
            if trial[:2] > best[:2]:
                best, self.decisions[:] = trial, changed
            if best.agrees or not _is_near(current[at], best):
                break  # the first difference is elsewhere now
        return best

    def _alternatives(self, at: int, current: list[Decision]) -> Iterator[list[Decision]]:
        """Yields the decisions with another option for one of them, or with some exchanged."""
        decision = current[at]
        match = decision.match
        for option in (*match.options, *_offsets(match), *other_layouts(match), *_flips(match)):
            if option is not decision.option:
                yield [*current[:at], replace(decision, option=option), *current[at + 1 :]]
                if len(option.order) > 1:
                    yield [_in_order(other, decision, option) for other in current]
        if ROLE in decision.witnesses:
            return
        for other in range(len(current)):
            if other != at:
                for pairs in ([(at, other)], _modules(current, at, other)):
                    yield from self._exchange(current, pairs)

    def _reorder(
        self, at: int, best: Trial, current: list[Decision], *, turn: bool
    ) -> Iterator[list[Decision]]:
        """Yields the decisions with a dimension of one of them, and those beside, in another order.

        With `turn`, also those near the first difference: queries and keys only agree together.
        """
        match = current[at].match
        lead = match.one if len(match.many) > 1 else match.many[0]
        sizes = {n for d in current for g in d.match.groups for shape in g.shapes for n in shape}
        near = [d.match for d in current if len(d.match.one.shapes[0]) > 1 and _is_near(d, best)]
        modules = [
            {i for i, d in enumerate(current) if any(map(d.match.is_beside, leads))}
            for leads in ([match], [match, *near])
        ]
        ends = (0, len(lead.shapes[0]) - 1)
        outputs_last = lead.entries[0].layout == "outputs last"
        for axis in dict.fromkeys(ends[::-1] if outputs_last else ends):
            for order in _orders(lead.shapes[0][axis], sizes, len(match.many)):
                for among in modules if turn and modules[0] != modules[1] else modules[:1]:
                    for parts in {option.order for option in match.options}:
                        yield [
                            _reorder(d, match, axis, order, parts) if i in among else d
                            for i, d in enumerate(current)
                        ]

    def _exchange(
        self, current: list[Decision], pairs: Sequence[tuple[int, int]]
    ) -> Iterator[list[Decision]]:
        """Yields the decisions with the targets of pairs exchanged, unless roles contradict."""
        swaps = [_swap(current[at], current[other]) for at, other in pairs]
        for ways in zip(*swaps, strict=False):
            changed = [*current]
            for (at, other), new in zip(pairs, ways, strict=True):
                changed[at], changed[other] = new
            matches = [decision.match for way in ways for decision in way]
            if self.roles is None or False not in map(self.roles.agree, matches):
                yield changed

    def _is_blind(self, at: int, decision: Decision) -> bool:
        """Returns whether the outputs stay the same without some of the arrays of a decision."""
        filled, axes = decision.match.filled, decision.option.axes
        parts: list[tuple[str, Any]] = [(entry.name, ...) for entry in filled]
        if axes and not decision.match.back:  # each layer of what is stacked
            rows = [(e.name, row) for e in filled for row in range(e.shape[axes[0]])]
            parts = [(name, (*[slice(None)] * axes[0], row)) for name, row in rows]
        for some in [parts] if ROLE in decision.witnesses else [[part] for part in parts]:
            shake = partial(_shake, some)
            if self.proof.run(self.make(self.decisions, shake)).agrees:
                return True
        if decision.settled:
            return False
        rivals = {group for match in decision.others for group in match.targets}
        return any(
            changed[at].named >= decision.named and self._trial(changed).agrees
            for other, rival in enumerate(self.decisions)
            if other != at and rivals & {*rival.match.targets}
            for changed in self._exchange(self.decisions, [(at, other)])
        )


def _is_near(decision: Decision, trial: Trial) -> bool:
    """Returns whether a decision may be why results differ."""
    return not trial.weights or any(e.name in trial.weights for e in decision.match.filled)


def _shake(parts: Sequence[tuple[str, Any]], made: Arrays) -> Arrays:
    import numpy as np

    shaken = {name: np.array(made[name].read()) for name, _ in parts}
    for name, at in parts:
        values = shaken[name][at]
        factors = np.random.default_rng(1).uniform(0.5, 1.5, values.shape)
        shaken[name][at] = (factors * values).astype(values.dtype)
    return made | {name: LazyArray.of(values) for name, values in shaken.items()}


def _swap(a: Decision, b: Decision) -> list[tuple[Decision, Decision]]:
    first, second = _with_target(a.match, b.match), _with_target(b.match, a.match)
    return [
        (replace(a, match=first, option=x), replace(b, match=second, option=y))
        for x in _options_like(a.option, first)
        for y in _options_like(b.option, second)
        if first and second
    ]


def _options_like(option: Option, match: Match | None) -> tuple[Option, ...]:
    """Returns the first options of a match, and before them another match's if that fits."""
    usual = match.options[:2] if match else ()
    fits = usual and usual[0].layouts[0].keys() == option.layouts[0].keys()
    return (option, *usual) if fits and option not in usual else usual


def _with_target(match: Match, other: Match) -> Match | None:
    """Returns the match of the sources of one with the targets of another."""
    if len(match.many) > 1 or len(other.many) > 1:
        return None
    many, one = (other.many[0], match.one) if match.back else (match.many[0], other.one)
    rest = many.without(match.over) or ()
    if (match.back, match.over) != (other.back, other.over) or len(rest) != len(one.members):
        return None
    return match_of((many,), one, match.over, back=match.back)


def _modules(decisions: Sequence[Decision], at: int, other: int) -> list[tuple[int, int]]:
    """Returns pairs of decisions about the parts of two modules, such as `actor` and `critic`."""
    names = {decision.match.targets[0].pattern: i for i, decision in enumerate(decisions)}
    a, b = (decisions[i].match.targets[0].pattern.split(".") for i in (at, other))
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    first, second = ".".join(a), ".".join(b)
    pairs = [
        (i, names[second + name[len(first) :]])
        for name, i in names.items()
        if name.startswith(f"{first}.") and second + name[len(first) :] in names
    ]
    return pairs if a and b and len(pairs) > 1 else []


def _in_order(other: Decision, decision: Decision, option: Option) -> Decision:
    """Returns a decision with its parts in the order of an option, if they are of its modules."""
    if not other.match.is_beside(decision.match):
        return other
    options = (o for o in other.match.options if (o.order, o.axis) == (option.order, option.axis))
    same = option if other is decision else next(options, None)
    return replace(other, option=same) if same else other


def _reorder(
    decision: Decision, lead: Match, axis: int, order: Order, parts: tuple[int, ...]
) -> Decision:
    """Returns a decision in the order of another's dimension, if it has that and the same parts."""
    options = (decision.option, *decision.match.options)
    option = next((each for each in options if each.order == parts), None)
    at = _dimension_like(decision.match, lead, axis)
    if at is None or option is None:
        return decision
    return replace(decision, option=_in_order_of(decision.match, option, at, order))


def _apart(decision: Decision) -> Iterator[Decision]:
    """Yields decisions about each array of a group whose numbers may count anything."""
    match = decision.match
    few = len(match.one.members) <= FEW and len(match.many) == 1 and not match.over
    if not few or "{}" in match.one.pattern.split(".")[:-2]:
        yield decision
        return
    for entry, other in zip(match.many[0].entries, match.one.entries, strict=True):
        many, one = (Group((e.name,), {(): e}) for e in (entry, other))
        yield replace(decision, match=replace(match, many=(many,), one=one), others=[])


def _after(match: Match, option: Option, steps: Mapping[Shape, Steps]) -> Option:
    """Returns an option with steps before its own; as sure for vectors, which follow matrices."""
    extended = {
        pair: Layout((*steps[pair[0]], *layout.steps))
        for pair, layout in option.layouts[0].items()
        if pair[0] in steps
    }
    vectors = all(len(shape) == 1 for shape in match.many[0].shapes)
    return replace(option, layouts=(extended,), certain=option.certain and vectors)


def _flips(match: Match) -> Iterator[Option]:
    """Yields the options of kernels reversed in space, as those of transposed convolutions are."""
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


def _offsets(match: Match) -> Iterator[Option]:
    """Yields the options with one more or less, as of norms whose weights are zeros at first."""
    shapes = match.many[0].shapes
    if len(match.many) == 1 and all(len(shape) == 1 for shape in shapes):
        for value in (1.0, -1.0):
            yield _after(match, match.options[0], dict.fromkeys(shapes, (("offset", value),)))


def _orders(size: int, sizes: Container[int], parts: int) -> Iterator[Order]:
    """Yields the orders that another implementation may have the elements of a dimension in.

    Those are the halves of each head that positions rotate, which are neighbours elsewhere; blocks
    of gates, or of queries with keys and values; parts of each head; and images that are flattened.
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


def _in_order_of(match: Match, option: Option, axis: int, order: Order) -> Option:
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


def _dimension_like(match: Match, other: Match, axis: int) -> int | None:
    """Returns the dimension of a match that has the order of one of another; None for none."""
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
