"""The search for pairs and layouts with which both models compute the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import prod
from typing import Any

from fmapper.errors import TransferError
from fmapper.twins.assign import FUNCTION, ROLE, Decision
from fmapper.twins.matches import Match, Option, match_of, offsets
from fmapper.twins.proof import Proof, Trial, print_of
from fmapper.twins.roles import Roles

_DRAWS = re.compile(r"::(rand|bernoulli|normal|random_bits|threefry|multinomial)")
_MOST_ROUNDS = 3
_FEW_OPTIONS = 3  # more are those of rotary positions
_MOST_TRIALS = 256  # of combinations, where nothing tells which of them is nearer
_MOST_JOINT = 3  # weights of one operation that are exchanged together

Make = Callable[[Sequence[Decision]], Mapping[str, Any]]


class Search:
    """The decisions of an assignment while models are called with them.

    Args:
        proof: The models.
        decisions: The decisions.
        make: Makes the target's arrays of the source's random ones, by some decisions.
        roles: What the programs say; pairs that they contradict are not tried.
    """

    def __init__(
        self, proof: Proof, decisions: list[Decision], make: Make, roles: Roles | None
    ) -> None:
        self._proof, self._make, self._roles = proof, make, roles
        self.decisions = decisions

    def run(self) -> None:
        """Changes the decisions until both models agree, and marks those as sure that are proved.

        Raises:
            TransferError: They do not agree, whatever is changed; names the first difference.
        """
        first = self._trial(self.decisions)
        if first.shapes:
            raise TransferError(
                "the outputs of both models have other shapes, so they cannot be compared: "
                f"{first.shapes}. Pass inputs of both as example_inputs= and target_inputs="
            )
        if not first.agrees:
            self._repair()
        for decision in self.decisions:
            if decision.settled:
                decision.witnesses = (*decision.witnesses, FUNCTION)
        for decision in [one for one in self.decisions if not one.settled]:
            if not self._is_blind(decision):
                decision.sure = True
                decision.option = replace(decision.option, certain=True)
                decision.witnesses = (*decision.witnesses, FUNCTION)

    def _trial(self, decisions: Sequence[Decision], *, watch: bool = False) -> Trial:
        return self._proof.run(self._make(decisions), watch=watch)

    # where they disagree

    def _repair(self) -> None:
        best = self._trial(self.decisions, watch=True)
        for every in (False, True):
            for _ in range(_MOST_ROUNDS):
                before = best
                for at in self._order(best, every=every):
                    best = self._improve(at, best)
                    if best.agrees:
                        return
                if best.score == before.score:
                    break
            if not every and self._guess():
                return
        raise TransferError(self._message(best))

    def _guess(self) -> bool:
        """Tries combinations of what is unsure, as where a scan hides the operations of layers."""
        current = [*self.decisions]
        unsure = [at for at, one in enumerate(current) if not one.settled]
        rotated = [at for at in unsure if len(current[at].match.options) > _FEW_OPTIONS]
        most = max((len(current[at].match.options) for at in rotated), default=1)
        swaps = [(a, b) for a in unsure for b in unsure if a < b and _swap(current[a], current[b])]
        choices = [range(most), *[(False, True)] * len(swaps)]
        for turn, *exchanged in islice(product(*choices), _MOST_TRIALS):
            changed = [*current]
            for at in rotated:
                options = current[at].match.options
                changed[at] = replace(changed[at], option=options[min(turn, len(options) - 1)])
            for (a, b), wanted in zip(swaps, exchanged, strict=True):
                swapped = _swap(changed[a], changed[b]) if wanted else None
                if swapped:
                    changed[a], changed[b] = swapped[0]
            if self._trial(changed).agrees:
                self.decisions[:] = changed
                return True
        return False

    def _order(self, best: Trial, *, every: bool) -> list[int]:
        """Returns the decisions to look at, in the order in which the target uses them."""
        chosen = [at for at, one in enumerate(self.decisions) if every or not one.settled]
        arrays = self._make(self.decisions)
        return sorted(chosen, key=lambda at: self._first_use(at, best, arrays))

    def _first_use(self, at: int, best: Trial, arrays: Mapping[str, Any]) -> int:
        """Returns the first operation that uses the arrays of a decision."""
        names = [e.name for target in self.decisions[at].match.targets for e in target.entries]
        prints = [print_ for name in names if (print_ := print_of(arrays[name])) is not None]
        pairs = enumerate(best.uses)
        used = (n for n, uses in pairs if any(p.is_like(one) for p in prints for one in uses))
        return next(used, len(best.uses))

    def _without(self, decision: Decision) -> dict[str, Any]:
        """Returns the arrays of the target, with others for a decision."""
        arrays = dict(self._make(self.decisions))
        for target in decision.match.targets:
            for entry in target.entries:
                arrays[entry.name] = _other_values(arrays[entry.name])
        return arrays

    def _improve(self, at: int, best: Trial) -> Trial:
        """Tries the other options of a decision, and others in its place; keeps the best."""
        current = [*self.decisions]
        for changed in self._alternatives(at, current, best):
            trial = self._trial(changed, watch=True)
            if trial.score > best.score:
                best, self.decisions[:] = trial, changed
            if best.agrees:
                break
        return best

    def _alternatives(
        self, at: int, current: list[Decision], best: Trial
    ) -> Iterator[list[Decision]]:
        """Yields the decisions with another option for one of them, or with others in its place."""
        for changed in self._every_alternative(at, current, best):
            pairs = zip(changed, current, strict=True)
            if self._roles is None or not any(
                self._roles.agree(new.match) is False for new, old in pairs if new is not old
            ):
                yield changed

    def _every_alternative(
        self, at: int, current: list[Decision], best: Trial
    ) -> Iterator[list[Decision]]:
        decision = current[at]
        for option in (*decision.match.options, *offsets(decision.match)):
            if option is not decision.option:
                yield [*current[:at], replace(decision, option=option), *current[at + 1 :]]
        if ROLE in decision.witnesses:
            return
        for other in range(len(current)):
            if other != at:
                yield from _exchanges(current, _same_layer(current, at, other))
        for other in range(len(current)):
            if other != at:
                yield from _exchanges(current, [(at, other)])
        yield from self._joint(at, current, best)

    def _joint(self, at: int, current: list[Decision], best: Trial) -> Iterator[list[Decision]]:
        """Yields the decisions with others for all weights of the operation that one is used in.

        As a scale and a bias that one operation takes: only both together give its result.
        """
        arrays = self._make(current)
        together = [i for i in self._used_with(at, current, best, arrays) if i != at]
        if not 1 <= len(together) < _MOST_JOINT:
            return
        places = (at, *together)
        fitting = [
            [i for i, d in enumerate(current) if i == place or _swap(current[place], d)]
            for place in places
        ]
        if prod(map(len, fitting)) > _MOST_TRIALS:
            return
        for order in product(*fitting):
            changed = [*current]
            for place, wanted in zip(places, order, strict=True):
                many = current[wanted].match.many
                now = next(i for i, d in enumerate(changed) if d.match.many == many)
                swapped = None if now == place else _swap(changed[place], changed[now])
                if swapped is not None:
                    changed[place], changed[now] = swapped[0]
            if len({*order}) == len(order) and changed != current:
                yield changed

    def _used_with(
        self, at: int, current: list[Decision], best: Trial, arrays: Mapping[str, Any]
    ) -> list[int]:
        """Returns the decisions for the weights of the first operation that uses those of one."""
        step = self._first_use(at, best, arrays)
        if step == len(best.uses):
            return []
        return [
            i
            for i, decision in enumerate(current)
            for target in decision.match.targets
            if (print_ := print_of(arrays[target.entries[0].name])) is not None
            and any(print_.is_like(one) for one in best.uses[step])
        ]

    def _message(self, best: Trial) -> str:
        last = max((at for at, ok in enumerate(best.matches) if ok), default=-1)
        place = next(iter(best.places[last + 1 :]), "the output")
        draws = next(filter(_DRAWS.search, (*self._proof.operations, *best.places)), "")
        if draws:
            return (
                f"the outputs of both models differ, as one draws random numbers, at {draws}. Set "
                "it to evaluation, or pass the argument that does in example_kwargs="
            )
        return (
            "both models give different outputs with the same weights, however these are paired. "
            f"The first difference is at {place} of the target. The architectures differ there, "
            "such as in an activation, an epsilon or a mask; or a pair was not found: pass it with "
            "rules="
        )

    # what outputs do not depend on

    def _is_blind(self, decision: Decision) -> bool:
        """Returns whether the outputs say nothing of a decision: they stay the same without it."""
        at = self.decisions.index(decision)
        if self._proof.run(self._without(decision)).agrees:
            return True
        rivals = {group for match in decision.others for group in match.targets}
        for other, one in enumerate(self.decisions):
            if other == at or not rivals & {*one.match.targets}:
                continue
            for first, second in _swap(decision, one) or ():
                changed = [*self.decisions]
                changed[at], changed[other] = first, second
                if self._trial(changed).agrees:
                    return True
        return False


def _other_values(array: Any) -> Any:
    import numpy as np

    values = np.asarray(array)
    shaken = np.random.default_rng(1).uniform(0.5, 1.5, values.shape) * values
    return shaken.astype(values.dtype)


def _same_layer(current: Sequence[Decision], at: int, other: int) -> list[tuple[int, int]]:
    """Returns what must change places if two layers do: all of their arrays of the same kind."""
    layers = [current[i].match.targets[0].parent for i in (at, other)]
    sides = [
        {d.match.targets[0].words.leaf: i for i, d in enumerate(current)
         if d.match.targets[0].parent == layer}
        for layer in layers
    ]  # fmt: skip
    if layers[0] == layers[1] or sides[0].keys() != sides[1].keys() or len(sides[0]) < 2:
        return []
    return [(sides[0][leaf], sides[1][leaf]) for leaf in sides[0]]


def _exchanges(
    current: list[Decision], pairs: Sequence[tuple[int, int]]
) -> Iterator[list[Decision]]:
    """Yields the decisions with some pairs of them in each other's place."""
    swaps = [_swap(current[first], current[second]) for first, second in pairs]
    if not all(swaps):
        return
    for chosen in product(*filter(None, swaps)):
        changed = [*current]
        for (first, second), (a, b) in zip(pairs, chosen, strict=True):
            changed[first], changed[second] = a, b
        if pairs:
            yield changed


def _swap(a: Decision, b: Decision) -> list[tuple[Decision, Decision]] | None:
    """Returns two decisions with each other's targets; None where they do not fit."""
    first, second = _with_target(a.match, b.match), _with_target(b.match, a.match)
    if first is None or second is None:
        return None
    return [
        (replace(a, match=first, option=x), replace(b, match=second, option=y))
        for x in first.options[:2]
        for y in second.options[:2]
    ]


def _with_target(match: Match, other: Match) -> Match | None:
    """Returns the match of the sources of one with the targets of another."""
    if len(match.many) > 1 or len(other.many) > 1 or match.back != other.back:
        return None
    if match.over != other.over:
        return None
    many, one = (other.many[0], match.one) if match.back else (match.many[0], other.one)
    if many.without(match.over) is None:
        return None
    found = {len(one.members), len(many.without(match.over) or ())}
    if len(found) > 1:
        return None
    return match_of(many, one, match.over, back=match.back)


__all__ = ["Option", "Search"]
