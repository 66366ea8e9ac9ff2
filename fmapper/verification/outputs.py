"""Compares the outputs of two models; how much of a difference is rounding is measured."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fmapper.verification.arrays import HALVES, dtype_of, is_floating
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

# What is no more than that of the largest element needs no measuring in double precision.
SURELY = 2.0**-40
# In double precision: a variance as the mean of squares less the square of the mean loses so much.
ROUNDING_OF_DOUBLE = 2.0**-36


@dataclass
class Outputs:
    """The outputs of two models, and what is known of their rounding.

    Attributes:
        sides: The models.
        values: Their outputs.
        pairs: The arrays of both.
        differences: How far they are apart.
        undecided: What could not be told.
        random: Why the two cannot be compared element by element; empty if they can.
        calm: Whether dropout was left out, and both were given the same random numbers.
    """

    sides: tuple[Side, Side]
    values: tuple[Any, Any]
    pairs: list[Pair]
    differences: tuple[Difference, ...] = ()
    undecided: list[str] = field(default_factory=list)
    random: str = ""
    calm: bool = False

    @functools.cached_property
    def wide(self) -> tuple[Any, Any] | None:
        """The outputs in double precision; None where one of the models cannot compute in it."""
        found = []
        for side in self.sides:
            try:
                if self.calm:
                    call = side.call(double=True)
                    output = None if call is None else side.outputs(call.output)
                else:
                    output = side.output_in_float64()
            except Exception:  # of mixed dtypes, or of code that insists on single precision
                return None
            if output is None or side.is_converted:
                return None
            found.append(output)
        return found[0], found[1]

    @property
    def can_double(self) -> bool:
        """Whether both models can compute in double precision."""
        return self.wide is not None

    @functools.cached_property
    def units(self) -> float:
        """A rounding of the precision that both compute in."""
        ours, theirs = (side.unit(x) for side, x in zip(self.sides, self.values, strict=True))
        return min(ours, theirs) or max(ours, theirs)

    def own(self, unit: float, *, double: bool) -> Mapping[str, float]:
        """Returns path -> how far outputs of `a` are from themselves when arrays move a little."""
        return self.sides[0].sensitivity(unit, double=double).outputs

    def exact(self) -> tuple[float, float] | None:
        """Returns the errors of both outputs against `a` in float64."""
        reference = self.sides[0].output_in_float64()
        if reference is None:
            return None
        errors = []
        for output in self.values:
            found = [difference(pair, CONVERTED) for pair in pairs_of(reference, output)]
            errors.append(max((one.error / one.scale for one in found if one.scale), default=0.0))
        return errors[0], errors[1]


def compare_outputs(sides: tuple[Side, Side], rtol: float | None, atol: float | None) -> Outputs:
    """Compares the outputs of two models in the modes of their calls."""
    found = _call(sides, calm=False)
    judged = _judge_with(found, rtol, atol)
    wrong = any(not one.ok for one in judged)
    trains = any(side.trains() for side in sides)
    if wrong and trains and not any(side.is_converted or side.trial is None for side in sides):
        found = _call(sides, calm=True)
        judged = _judge_with(found, rtol, atol)
    found.differences = tuple(judged)
    return found


def _call(sides: tuple[Side, Side], *, calm: bool) -> Outputs:
    values = []
    for side in sides:
        call = side.call() if calm else None
        values.append(side.output() if call is None else side.outputs(call.output))
    return Outputs(sides, (values[0], values[1]), [*pairs_of(*values)], calm=calm)


def _judge_with(found: Outputs, rtol: float | None, atol: float | None) -> list[Difference]:
    if not found.pairs:
        return [*plain_values(found.values[0], "output")]
    if rtol is not None or atol is not None:
        return [difference(pair, Bounds(rtol, atol or 0.0)) for pair in found.pairs]
    return _judge(found)


def _judge(found: Outputs) -> list[Difference]:
    measured = all(side.trial is not None and not side.is_converted for side in found.sides)
    bounds = Bounds() if measured else CONVERTED
    pairs = [
        replace(pair, note=f"dtype {dtype_of(pair.x)} and {dtype_of(pair.y)}")
        if measured and differ_in_halves(pair)
        else pair
        for pair in found.pairs
    ]
    plain = [difference(pair, bounds) for pair in pairs]
    if any(one.note for one in plain) or (not measured and all(one.ok for one in plain)):
        return plain
    if not measured or found.wide is None:
        own = {k: OWN * v for k, v in found.own(2 * found.units, double=False).items()}
        return [difference(pair, replace(bounds, own=own)) for pair in pairs]
    return _judge_in_double(found, pairs, plain)


def _judge_in_double(
    found: Outputs, pairs: list[Pair], plain: list[Difference]
) -> list[Difference]:
    """Judges by the outputs in double precision, in which another computation shows."""
    assert found.wide is not None
    wide = [*pairs_of(*found.wide)]
    exact = [difference(pair, Bounds(SURELY)) for pair in wide]
    if not all(one.ok for one in exact):
        own = {k: OWN * v for k, v in found.own(ROUNDING_OF_DOUBLE, double=True).items()}
        exact = [difference(p, Bounds(units=SURELY * 2.0**52, own=own)) for p in wide]
    if all(one.ok for one in exact):
        return _judge_rounding(found, pairs, plain, wide)
    own = {k: OWN * v for k, v in found.own(2 * found.units, double=True).items()}
    limits = {p.path: max(own.get(p.path, 0.0), 8 * found.units * _scale(p)) for p in wide}
    judged = []
    for one, near in zip(exact, plain, strict=True):
        if one.ok or one.note:
            judged.append(near if one.ok and near.ok else replace(one, precision="float64"))
            continue
        limit = limits[one.path]
        if one.error <= limit:
            found.undecided.append(
                f"{one.path} is off by {one.share:.1e} of its largest element in float64, no more "
                "than a rounding of the models' own precision makes of it"
            )
        judged.append(replace(one, allowed=max(one.allowed, limit), precision="float64"))
    return judged


def _judge_rounding(
    found: Outputs, pairs: list[Pair], plain: list[Difference], wide: list[Pair]
) -> list[Difference]:
    """Judges models that are the same in double precision: `b` must round as `a` does."""
    if all(one.ok for one in plain):
        return plain
    own = dict(found.own(2 * found.units, double=False))
    for pair, exact in zip(pairs, wide, strict=True):
        errors = [_error(exact.x, pair.x), _error(exact.y, pair.y)]
        rounds_alike = not _has_more_halves(found.sides)
        own[pair.path] = max(own.get(pair.path, 0.0), errors[0], errors[1] if rounds_alike else 0.0)
    bounds = Bounds(own={path: OWN * one for path, one in own.items()})
    return [difference(pair, bounds) for pair in pairs]


def _has_more_halves(sides: tuple[Side, Side]) -> bool:
    """Returns whether `b` computes in half precision where `a` does not."""
    computed = []
    for side, other in zip(sides, reversed(sides), strict=True):
        seen = side.watch(other.adapter) or ()
        trial = side.trial
        weights = () if trial is None else (*trial.weights.values(), *trial.fixed.values())
        results = (x for one in seen for x in one.values)
        computed.append({dtype_of(x) for x in (*weights, *results)} & HALVES)
    return bool(computed[1] - computed[0])


def _error(x: Any, y: Any) -> float:
    error, _, _, note = measure(x, y)
    return 0.0 if note else error


def _scale(pair: Pair) -> float:
    if pair.note or not is_floating(pair.x):
        return 0.0
    return measure(pair.x, pair.x)[1]
