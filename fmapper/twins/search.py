"""The search for pairs and layouts with which both models compute the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fmapper.errors import TransferError
from fmapper.twins.assign import FUNCTION, ROLE, Decision
from fmapper.twins.matches import Match, match_of, offsets
from fmapper.twins.proof import Proof, Trial
from fmapper.twins.roles import Roles

_DRAWS = re.compile(r"::(rand|bernoulli|normal|random_bits|threefry|multinomial)")

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
            before = None
            while before != best.score:
                before = best.score
                for at in range(len(self.decisions)):
                    if every or not self.decisions[at].settled:
                        best = self._improve(at, best)
                    if best.agrees:
                        return
        raise TransferError(self._message(best))

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
        for changed in self._alternatives(at, current):
            trial = self._trial(changed, watch=True)
            if trial.score > best.score:
                best, self.decisions[:] = trial, changed
            if best.agrees:
                break
        return best

    def _alternatives(self, at: int, current: list[Decision]) -> Iterator[list[Decision]]:
        """Yields the decisions with another option for one of them, or with two exchanged."""
        decision = current[at]
        for option in (*decision.match.options, *offsets(decision.match)):
            if option is not decision.option:
                yield [*current[:at], replace(decision, option=option), *current[at + 1 :]]
        for other in range(len(current)):
            if other == at or ROLE in decision.witnesses:
                continue
            for first, second in _swap(decision, current[other]) or ():
                roles = self._roles
                if roles is None or False not in (
                    roles.agree(first.match),
                    roles.agree(second.match),
                ):
                    changed = [*current]
                    changed[at], changed[other] = first, second
                    yield changed

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
