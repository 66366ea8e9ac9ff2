"""The search for pairs and layouts with which both models compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from fmapper.checkpoints.lazy import LazyArray
from fmapper.twins.assign import FEW
from fmapper.twins.groups import Group
from fmapper.twins.matches import (
    FUNCTION,
    ROLE,
    Decision,
    Match,
    Option,
    Order,
    dimension_like,
    flips,
    match_of,
    offsets,
    orders,
    other_layouts,
    reorder,
)
from fmapper.twins.one_sided import Arrays, Change
from fmapper.twins.proof import Proof, Trial
from fmapper.twins.roles import Roles


@dataclass
class Search:
    """The decisions of an assignment while models are called with them."""

    proof: Proof
    decisions: list[Decision]
    make: Callable[[Sequence[Decision], Change], Arrays]  # the target's, with a change of them
    roles: Roles | None  # pairs that they contradict are not tried

    def run(self) -> str:
        """Changes the decisions until both models agree, and marks those as sure that are proved.

        A decision is proved if the outputs depend on it.

        Returns:
            Where they first differ, whatever is changed; empty if they agree.

        Raises:
            TransferError: Their outputs cannot be compared, or the target draws random numbers.
        """
        if not self._trial(self.decisions).agrees and (problem := self._repair()):
            return problem
        for at, decision in enumerate(self.decisions):
            two = decision.settled and decision.named and ROLE in decision.witnesses
            if two or not self._is_blind(at, decision):
                decision.sure = True
                decision.option = replace(decision.option, certain=True)
                decision.witnesses = (*decision.witnesses, FUNCTION)
        proved = [d.match for d in self.decisions if FUNCTION in d.witnesses]
        for decision in self.decisions:  # the bias of keys has the order of their matrix
            if decision.doubt and any(map(decision.match.is_beside, proved)):
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
            while last != best.score:
                last = best.score
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
            if trial.score > best.score:
                best, self.decisions[:] = trial, changed
            if best.agrees or not _is_near(current[at], best):
                break  # the first difference is elsewhere now
        return best

    def _alternatives(self, at: int, current: list[Decision]) -> Iterator[list[Decision]]:
        """Yields the decisions with another option for one of them, or with some exchanged."""
        decision = current[at]
        match = decision.match
        for option in (*match.options, *offsets(match), *other_layouts(match), *flips(match)):
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
        """Yields the decisions with a dimension of one of them in another order.

        That is in those of its module, too, or in the end in all that are near the first
        difference, as queries and keys only agree with each other.
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
            for order in orders(lead.shapes[0][axis], sizes, len(match.many)):
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
        parts: list[dict[str, Any]] = [{entry.name: ...} for entry in filled]
        if ROLE in decision.witnesses:
            parts = [{name: at for part in parts for name, at in part.items()}]
        elif axes and not decision.match.back:  # each layer of what is stacked
            rows = [(e.name, row) for e in filled for row in range(e.shape[axes[0]])]
            parts = [{name: (*[slice(None)] * axes[0], row)} for name, row in rows]
        for part in parts:
            shake = partial(_shake, part)
            if self.proof.run(self.make(self.decisions, shake)).agrees:
                return True
        if decision.settled:
            return False
        rivals = {group for match in decision.others for group in match.targets}
        return any(
            self._trial(changed).agrees
            for other, rival in enumerate(self.decisions)
            if other != at and rivals & {*rival.match.targets}
            for changed in self._exchange(self.decisions, [(at, other)])
        )


def _is_near(decision: Decision, trial: Trial) -> bool:
    """Returns whether a decision may be why results differ."""
    return not trial.weights or any(e.name in trial.weights for e in decision.match.filled)


def _shake(part: dict[str, Any], made: Arrays) -> Arrays:
    import numpy as np

    shaken = {name: np.array(made[name].read()) for name in part}
    for name, at in part.items():
        values = shaken[name][at]
        factors = np.random.default_rng(1).uniform(0.5, 1.5, values.shape)
        shaken[name][at] = (factors * values).astype(values.dtype)
    return made | {name: LazyArray.of(values) for name, values in shaken.items()}


def _swap(a: Decision, b: Decision) -> list[tuple[Decision, Decision]]:
    """Returns two decisions with each other's targets; none where they do not fit."""
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
    rest = many.without(match.over)
    if (match.back, match.over) != (other.back, other.over) or rest is None:
        return None
    fits = len(rest) == len(one.members)
    return match_of((many,), one, match.over, back=match.back) if fits else None


def _modules(decisions: Sequence[Decision], at: int, other: int) -> list[tuple[int, int]]:
    """Returns pairs of decisions about the parts of two modules; none if they have only one part.

    The modules are where the names of two targets differ: `actor` and `critic` of `actor.0.bias`.
    """
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
    at = dimension_like(decision.match, lead, axis)
    if at is None or option is None:
        return decision
    return replace(decision, option=reorder(decision.match, option, at, order))


def _apart(decision: Decision) -> Iterator[Decision]:
    """Yields decisions about the arrays of a group that are fields or layers of one module.

    Their names differ in numbers that may count anything, as in `a1` and `a2`.
    """
    match = decision.match
    few = len(match.one.members) <= FEW and len(match.many) == 1 and not match.over
    if not few or "{}" in match.one.pattern.split(".")[:-2]:
        yield decision
        return
    for entry, other in zip(match.many[0].entries, match.one.entries, strict=True):
        many, one = (Group((e.name,), {(): e}) for e in (entry, other))
        yield replace(decision, match=replace(match, many=(many,), one=one), others=[])
