"""Finds the first operation of a forward pass where two models part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fmapper.backends.compute import Observation
from fmapper.backends.models import Models
from fmapper.verification.alignment import WEIGHT, Alignment, align
from fmapper.verification.arrays import UNITS, is_floating, to_host
from fmapper.verification.differences import (
    CONVERTED,
    Bounds,
    Difference,
    Pair,
    difference,
    measure,
)
from fmapper.verification.models.side import Side, arrays_in
from fmapper.verification.report import Operation, Parting, part_at

if TYPE_CHECKING:
    from fmapper.verification.outputs import Outputs

# For an operation that sorts or selects: its elements agree, their places do not.
TIES = "the same elements from other places, as there are equal ones"
_CLOSE = 2.0**-30
_ROUNDED = 2.0**-22  # relative to the largest element: a constant in single precision


def locate(sides: tuple[Side, Side], compared: Outputs, mode: str) -> Parting | None:
    """Returns the first operation whose operands agree and whose result does not.

    None if the operations of a model cannot be watched.
    """
    if any(side.is_converted for side in sides):
        for operation, outcome in _by_name(sides):
            if not outcome.ok:
                return part_at(outcome, "forward", a=_operation(operation), mode=mode)
        return None
    wrong = [outcome for outcome in compared.differences if not outcome.ok]
    double = compared.can_double and any(outcome.precision or outcome.note for outcome in wrong)
    runs = _watch(sides, double=double)
    if runs is None and double:
        double, runs = False, _watch(sides, double=False)
    if runs is None or not wrong:
        return None
    place = _part(runs, sides, compared, mode, double=double)
    if place is None or place.a is None or not any(side.hides_steps(o) for side, o in _both(sides)):
        return place
    finer = _watch(sides, double=double, fine=True)
    inner = None if finer is None else _part(finer, sides, compared, mode, double=double)
    if inner is None or inner.a is None or inner.a.place != place.a.place:
        return place
    return replace(place, b=inner.b)  # inside an operation of `a` that combines several steps


def _both(sides: tuple[Side, Side]) -> Iterator[tuple[Side, Models | None]]:
    """Yields each side with the framework of the other."""
    a, b = sides
    yield from ((a, b.adapter), (b, a.adapter))


def _part(
    runs: tuple[list[Observation], list[Observation]], sides: tuple[Side, Side], compared: Outputs,
    mode: str, *, double: bool,
) -> Parting | None:  # fmt: skip
    """Returns the first operation of two runs whose operands agree and whose result does not."""
    a, b = runs
    wrong = [outcome for outcome in compared.differences if not outcome.ok]
    ends = _ends(compared, double=double)
    unit = min(compared.unit, UNITS["float32"]) if double else compared.unit
    measured = sides[0].tolerance(a, sides[1].adapter, 2 * unit, double=double)
    # every result is slightly off there: look for one that is as far off as the outputs
    share = 0.0 if double else max(outcome.share for outcome in wrong) / 8
    loose = [max(limit, share) for limit in measured if math.isfinite(share)]
    tries: list[tuple[Sequence[float] | float, bool]]
    tries = [(loose or measured, False), (measured, False), (_CLOSE, False)]
    for tolerance, is_first in [(_CLOSE, True), *tries] if double else tries:
        alignment = align(a, b, tolerance)
        ours, theirs = alignment.first_apart(*ends)
        if ours is None and theirs is None:
            continue
        place = _describe(alignment, ours, theirs, tolerance, mode, double=double)
        rounded = double and (place.share <= _ROUNDED or alignment.takes_table(*ends))
        if not (is_first and rounded):  # a rounded table occurs before the mistake
            return replace(place, rounded=rounded)
    ours, theirs = alignment.forms_apart(*ends)
    form = next((outcome for outcome in wrong if outcome.note), None)
    if form is None or (ours is None and theirs is None):
        return None
    of_a, of_b = (None if i is None else _operation(run[i]) for i, run in ((ours, a), (theirs, b)))
    return part_at(replace(form, path=str(of_a or of_b)), "forward", a=of_a, b=of_b, mode=mode)


def _watch(
    sides: tuple[Side, Side], *, double: bool, fine: bool = False
) -> tuple[list[Observation], list[Observation]] | None:
    runs = []
    for side, other in _both(sides):
        try:
            run = side.watch(None if fine else other, double=double)
        except Exception:  # mixed dtypes, if a model insists on single precision
            if not double:
                raise
            return None
        if run is None:
            return None
        runs.append(run)
    return runs[0], runs[1]


def _ends(compared: Outputs, *, double: bool) -> tuple[list[Any], list[Any]]:
    """Returns the arrays of both outputs that differ."""
    values = compared.wide if double and compared.wide is not None else compared.values
    wrong = {outcome.path for outcome in compared.differences if not outcome.ok}
    ours, theirs = map(arrays_in, values)
    pairs = [pair for pair in compared.pairs if pair.path in wrong]
    return (
        [ours[pair.path] for pair in pairs if pair.path in ours],
        [theirs[pair.other] for pair in pairs if pair.other in theirs],
    )


def _describe(
    alignment: Alignment, ours: int | None, theirs: int | None, tolerance: Sequence[float] | float,
    mode: str, *, double: bool,
) -> Parting:  # fmt: skip
    a = None if ours is None else alignment.a[ours]
    b = None if theirs is None else alignment.b[theirs]
    of_a, of_b = (
        None if observation is None else _operation(observation) for observation in (a, b)
    )
    stage, name = "forward", ""
    if a is not None and a.op == WEIGHT:  # or a buffer, such as a table that is computed once
        stage, name = "weights", a.module
    path = name or str(of_a if of_a is not None else of_b)
    near = _nearest(a, alignment.b) if a is not None else None
    if near is None or a is None or ours is None:
        limit = tolerance if isinstance(tolerance, float) else 0.0
        return Parting(path, math.inf, 0.0, limit, "has no counterpart in the other model",
                       stage=stage, a=of_a, b=of_b, name=name, mode=mode)  # fmt: skip
    limit = tolerance if isinstance(tolerance, float) else tolerance[ours]
    outcome = difference(replace(near, path=path), Bounds(limit), "float64" if double else "")
    return part_at(outcome, stage, a=of_a, b=of_b, name=name, mode=mode)


def _nearest(result: Observation, run: Sequence[Observation]) -> Pair | None:
    """Returns the result of the other run that is nearest to the result of an operation."""
    import numpy as np

    x = to_host(result.values[0])
    best: tuple[float, Any] = (math.inf, None)
    for other in run:
        for value in other.values[:1]:
            y = to_host(value)
            if y.size != x.size or is_floating(x) != is_floating(y):
                continue
            flat = [np.sort(array, axis=None) for array in (x, y)]
            if x.shape != y.shape:
                y = y.reshape(x.shape)
            error = measure(*flat)[0]
            if error < best[0]:
                best = (error, y)
    return None if best[1] is None else Pair("", x, best[1])


def _operation(observation: Observation) -> Operation:
    return Operation(observation.module, observation.op, observation.source, observation.loop)


def worst_by_layer(sides: tuple[Side, Side], compared: Outputs) -> tuple[Difference, ...]:
    """Returns for each layer of `a` the largest difference among its operations."""
    layers: dict[str, Difference] = {}
    converted = any(side.is_converted for side in sides)
    for operation, outcome in _by_name(sides) if converted else _by_value(sides, compared):
        worst = layers.get(operation.module)
        if worst is None or (outcome.ok, -outcome.share) < (worst.ok, -worst.share):
            layers[operation.module] = replace(outcome, path=operation.module or "model")
    return tuple(layers.values())


def _by_value(
    sides: tuple[Side, Side], compared: Outputs
) -> Iterator[tuple[Observation, Difference]]:
    """Yields each result of `a` with its difference from the nearest one of `b`."""
    runs = _watch(sides, double=False)
    if runs is None:
        return
    adapter = sides[1].adapter
    tolerance = sides[0].tolerance(runs[0], adapter, 2 * compared.unit, double=False)
    for result, limit in zip(runs[0], tolerance, strict=True):
        near = _nearest(result, runs[1]) if result.values and result.source else None
        if near is not None:
            yield result, difference(near, Bounds(limit))


def _by_name(sides: tuple[Side, Side]) -> Iterator[tuple[Observation, Difference]]:
    """Yields each common result of models with the same modules and operations."""
    a, b = sides
    watched = [a.watch(b.adapter), b.watch(a.adapter)]
    if watched[0] is None or watched[1] is None:
        return
    theirs = dict(_occurrences(watched[1]))
    for key, result in _occurrences(watched[0]):
        other = theirs.get(key)
        if other is None:
            continue
        path = str(_operation(result))
        pairs = zip(result.values, other.values, strict=False)
        outcomes = [difference(Pair(path, to_host(x), to_host(y)), CONVERTED) for x, y in pairs]
        for i, outcome in enumerate(outcomes):
            is_tie = (
                i > 0 and outcomes[0].ok and outcome.scale == 0 and not math.isinf(outcome.error)
            )
            tied = not outcome.ok and is_tie
            yield result, replace(outcome, note=f"{TIES}: {outcome.note}") if tied else outcome


def _occurrences(run: Iterable[Observation]) -> Iterator[tuple[tuple[str, str, int], Observation]]:
    """Yields each result outside of loops with its scope, operation and occurrence."""
    counts: dict[tuple[str, str], int] = {}
    for observation in run:
        if observation.loop:
            continue
        scope = observation.module if observation.scope is None else observation.scope
        key = scope, observation.op
        counts[key] = counts.get(key, 0) + 1
        yield (*key, counts[key]), observation
