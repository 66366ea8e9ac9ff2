"""Compares the outputs of two models, and measures how much of a difference is rounding."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fmapper.verification.arrays import HALVES, UNITS, dtype_of
from fmapper.verification.differences import (
    CONVERTED,
    OWN,
    Bounds,
    Difference,
    Pair,
    differ_in_halves,
    difference,
    measure,
    pairs_of,
    plain_values,
)
from fmapper.verification.models.side import Side

# Relative differences up to this need no measuring in double precision.
SURELY = 2.0**-40
# In double precision: a variance as the mean of squares less the square of the mean loses so much.
ROUNDING_OF_DOUBLE = 2.0**-36


@dataclass
class Outputs:
    """The outputs of two models, and facts about their rounding.

    Attributes:
        sides: The models.
        values: Their outputs.
        pairs: The arrays of both.
        differences: How far they are apart.
        undecided: Questions that could not be decided.
        random: Why the two cannot be compared element by element; empty if they can.
        calm: Whether dropout was left out, and both were given the same random numbers.
        strict: The differences if those in float64 that a table in single precision may explain are
            not allowed; empty if there are none.
    """

    sides: tuple[Side, Side]
    values: tuple[Any, Any]
    pairs: list[Pair]
    differences: tuple[Difference, ...] = ()
    undecided: list[str] = field(default_factory=list)
    random: str = ""
    calm: bool = False
    strict: tuple[Difference, ...] = ()

    @functools.cached_property
    def wide(self) -> tuple[Any, Any] | None:
        """The outputs in double precision; None if one of the models cannot compute in it."""
        outputs = []
        for side in self.sides:
            try:
                if self.calm:
                    call = side.call(double=True)
                    output = None if call is None else side.outputs(call.output)
                else:
                    output = side.output_in_float64()
            except Exception:  # mixed dtypes, or code that insists on single precision
                return None
            if output is None or (side.is_converted and not self.calm):
                return None
            outputs.append(output)
        return outputs[0], outputs[1]

    @property
    def can_double(self) -> bool:
        """Whether both models can compute in double precision."""
        return self.wide is not None

    @functools.cached_property
    def unit(self) -> float:
        """A rounding in the coarsest precision in which both compute."""
        ours, theirs = (side.unit for side in self.sides)
        return min(ours, theirs) or max(ours, theirs) or UNITS["float32"]

    def own(self, off: float, *, double: bool) -> Mapping[str, float]:
        """Maps paths to the allowed distances of outputs of `a` from those of another model."""
        distances = self.sides[0].sensitivity(off, double=double).outputs
        return {path: OWN * distance for path, distance in distances.items()}

    def exact(self) -> tuple[float, float] | None:
        """Returns the errors of both outputs against `a` in float64."""
        reference = self.sides[0].output_in_float64()
        if reference is None:
            return None
        errors = []
        for output in self.values:
            differences = [difference(pair, CONVERTED) for pair in pairs_of(reference, output)]
            errors.append(
                max(
                    (outcome.error / outcome.scale for outcome in differences if outcome.scale),
                    default=0.0,
                )
            )
        return errors[0], errors[1]


def compare_outputs(
    sides: tuple[Side, Side], rtol: float | None, atol: float | None, *, calm: bool = False
) -> Outputs:
    """Compares the outputs of two models in their modes; if `calm`, without dropout."""
    outputs = _call(sides, calm=calm)
    judged = _judge_with(outputs, rtol, atol)
    wrong = any(not outcome.ok for outcome in judged)
    can_be_calm = wrong and all(side.trial is not None for side in sides)
    if can_be_calm and (any(side.trains() for side in sides) or all(map(_draws, sides))):
        outputs = _call(sides, calm=True)
        judged = _judge_with(outputs, rtol, atol)
    outputs.differences = tuple(judged)
    a, b = sides
    if b.dtypes and b.dtypes <= HALVES and a.dtypes & HALVES and not a.dtypes <= HALVES:
        names = [", ".join(sorted(side.dtypes)) for side in sides]
        outputs.undecided.append(
            f"whether b rounds more: a computes in {names[0]}, b in {names[1]} only, as far as "
            "observed"
        )
    return outputs


def _draws(side: Side) -> bool:
    call = side.call()
    return call is not None and (call.draws != "" or bool(call.rates))


def _call(sides: tuple[Side, Side], *, calm: bool) -> Outputs:
    values = []
    for name, side in zip("ab", sides, strict=True):
        try:
            call = side.call() if calm else None
            values.append(side.output() if call is None else side.outputs(call.output))
        except Exception as error:
            error.add_note(f"in the call of {name}, a {type(side.model).__name__}")
            raise
    return Outputs(sides, (values[0], values[1]), [*pairs_of(*values)], calm=calm)


def _judge_with(outputs: Outputs, rtol: float | None, atol: float | None) -> list[Difference]:
    if not outputs.pairs:
        return [*plain_values(outputs.values[0], "output")]
    if rtol is not None or atol is not None:
        return [difference(pair, Bounds(rtol, atol or 0.0)) for pair in outputs.pairs]
    return _judge(outputs)


def _judge(outputs: Outputs) -> list[Difference]:
    measured = all(side.trial is not None and not side.is_converted for side in outputs.sides)
    bounds = Bounds() if measured else CONVERTED
    pairs = [
        replace(pair, note=f"dtype {dtype_of(pair.x)} and {dtype_of(pair.y)}")
        if measured and differ_in_halves(pair)
        else pair
        for pair in outputs.pairs
    ]
    plain = [difference(pair, bounds) for pair in pairs]
    if any(outcome.note for outcome in plain) or (
        not measured and all(outcome.ok for outcome in plain)
    ):
        return plain
    if not measured or outputs.wide is None:
        limits = outputs.own(2 * outputs.unit, double=False)
        return [difference(pair, replace(bounds, own=limits)) for pair in pairs]
    wide = [*pairs_of(*outputs.wide)]
    exact = _judge_in_double(outputs, wide)
    rounded = _judge_rounding(outputs, pairs, plain, wide)
    if outputs.strict:
        outputs.strict = tuple(_join(outputs.strict, rounded))
    return _join(exact, rounded)


def _join(exact: Sequence[Difference], rounded: Sequence[Difference]) -> list[Difference]:
    """Returns for each array the worse difference of both precisions."""
    return [
        near if outcome.ok and (not near.ok or not outcome.precision) else outcome
        for outcome, near in zip(exact, rounded, strict=True)
    ]


def _judge_in_double(outputs: Outputs, wide: list[Pair]) -> list[Difference]:
    """Judges by the outputs in double precision, which reveal a different computation."""
    exact = [difference(pair, Bounds(units=SURELY * 2.0**52)) for pair in wide]
    if all(outcome.ok for outcome in exact):
        return exact
    limits = outputs.own(ROUNDING_OF_DOUBLE, double=True)
    exact = [difference(pair, Bounds(units=SURELY * 2.0**52, own=limits)) for pair in wide]
    if all(outcome.ok for outcome in exact):
        return exact
    outputs.strict = tuple(replace(outcome, precision="float64") for outcome in exact)
    unit = min(outputs.unit, UNITS["float32"])  # tables stay rounded
    loose = outputs.own(2 * unit, double=True)
    judged = []
    for outcome in exact:
        limit = max(loose.get(outcome.path, 0.0), 8 * unit * outcome.scale)
        if not outcome.ok and not outcome.note and outcome.error <= limit:
            outputs.undecided.append(
                f"{outcome.path} is off by {outcome.share:.1e} of its largest element in "
                "float64, no more than a rounding in the models' own precision explains"
            )
        is_open = not outcome.ok and not outcome.note
        allowed = max(outcome.allowed, limit) if is_open else outcome.allowed
        judged.append(replace(outcome, allowed=allowed, precision="" if outcome.ok else "float64"))
    return judged


def _judge_rounding(
    outputs: Outputs, pairs: list[Pair], plain: list[Difference], wide: list[Pair]
) -> list[Difference]:
    """Checks that `b` rounds no more than `a`, unless it computes in the same dtypes."""
    if all(outcome.ok for outcome in plain):
        return plain
    limits = dict(outputs.own(2 * outputs.unit, double=False))
    a, b = outputs.sides
    rounds_alike = not (b.dtypes - a.dtypes) & HALVES
    for pair, exact in zip(pairs, wide, strict=True):
        errors = [_error(exact.x, pair.x), _error(exact.y, pair.y) if rounds_alike else 0.0]
        limits[pair.path] = max(limits.get(pair.path, 0.0), OWN * max(errors))
    return [difference(pair, Bounds(own=limits)) for pair in pairs]


def _error(x: Any, y: Any) -> float:
    error, _, _, note = measure(x, y)
    return 0.0 if note else error
