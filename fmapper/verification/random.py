"""Compares the random numbers of two models: dropout by means and spreads over seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fmapper.errors import CycleError
from fmapper.verification.arrays import to_host
from fmapper.verification.differences import Difference
from fmapper.verification.models.side import arrays_in
from fmapper.verification.models.spreads import Spread
from fmapper.verification.models.trial import Call

if TYPE_CHECKING:
    from fmapper.verification.outputs import Outputs

SEEDS = 256
MOST = 6.0  # standard errors; see `Spread.distance`


def compare_draws(compared: Outputs) -> tuple[Difference, ...]:
    """Compares the random numbers of two models, and judges random outputs again.

    Nothing is compared if neither draws any.
    """
    sides = compared.sides
    wrong = any(not outcome.ok for outcome in compared.differences)
    if not compared.calm and not wrong:
        return ()
    calls = [side.call() for side in sides]
    if calls[0] is None or calls[1] is None:
        return ()
    a, b = calls[0], calls[1]
    if not compared.calm:
        return _compare_presence(a, b)
    if sides[0].is_recorded:
        return _compare_rates(compared, a, b)
    if a.draws is None or b.draws is None:
        compared.random = (
            "a converted model draws numbers of its own, so that outputs are compared by means "
            "and spreads alone"
        )
        return _compare_noise(compared, a, b)
    if (a.draws or b.draws) and (a.draws != b.draws or wrong):
        compared.random = (
            f"a draws {a.draws or 'nothing'}, b draws {b.draws or 'nothing'} "
            "besides the dropout of layers, so that outputs are compared by means and spreads alone"
        )
        return _compare_noise(compared, a, b)
    try:
        return () if wrong else _compare_dropout(compared, a, b)
    except (CycleError, RecursionError):  # a cyclic output has no order of leaves
        return ()


def _compare_presence(a: Call, b: Call) -> tuple[Difference, ...]:
    ours, theirs = _describe(a), _describe(b)
    if bool(ours) == bool(theirs):
        return ()
    note = f"a draws {ours or 'nothing'}, b draws {theirs or 'nothing'}"
    return (Difference("random numbers", math.inf, 0.0, 0.0, note),)


def _compare_rates(compared: Outputs, a: Call, b: Call) -> tuple[Difference, ...]:
    """Compares the rates of dropout with those of goldens, which hold no random numbers."""
    if b.draws is None:
        note = (
            "b is a converted model whose dropout cannot be left out, as it is in goldens. Record "
            "them in evaluation, or compare with the model itself"
        )
        compared.random = note
        return (Difference("random numbers", math.inf, 0.0, 0.0, note),)
    if _describe(a) == _describe(b):
        return ()
    note = f"a draws {_describe(a) or 'nothing'}, b draws {_describe(b) or 'nothing'}"
    return (Difference("random numbers", math.inf, 0.0, 0.0, note),)


def _describe(call: Call) -> str:
    rates = [f"dropout of {rate:g}" for rate in sorted(call.rates)]
    return ", ".join([*rates, *([call.draws] if call.draws else [])])


def _compare_dropout(compared: Outputs, a: Call, b: Call) -> tuple[Difference, ...]:
    """Compares dropout of one rate after the other."""
    sides = compared.sides
    drawn = []
    for side in sides:
        trial = side.trial
        assert trial is not None
        drawn.append(trial.draw(trial.weights, range(SEEDS)))
    ours, theirs = (
        {rate: samples for rate, samples in spreads.items() if len(samples) > 1}
        for spreads in drawn
    )
    if not ours and not theirs:
        return ()
    rates = [sorted(rate for rate in spreads if not math.isnan(rate)) for spreads in (ours, theirs)]
    if rates[0] != rates[1]:
        note = f"a has {_rates(rates[0])}, b {_rates(rates[1])}"
        return (Difference("dropout", math.inf, 0.0, 0.0, note),)
    orders = _orders(compared, a, b)
    if orders is None:
        compared.undecided.append("dropout: outputs_of_b hides which array is which")
        return ()
    differences = []
    for rate in ours:
        still = [to_host(a.leaves[i]) for i in orders[0]]
        distance = _distance(still, orders, ours[rate], theirs.get(rate, drawn[1].get(rate, [])))
        name = "noise" if math.isnan(rate) else f"dropout of {rate:g}"
        differences.append(Difference(name, distance, 1.0, MOST, precision=_ERRORS))
    return tuple(differences)


_ERRORS = "standard errors of means and spreads over seeds"


def _rates(rates: list[float]) -> str:
    return f"dropout of {', '.join(f'{rate:g}' for rate in rates)}" if rates else "no dropout"


def _compare_noise(compared: Outputs, a: Call, b: Call) -> tuple[Difference, ...]:
    """Compares outputs with all of their randomness."""
    orders = _orders(compared, a, b)
    if orders is None:
        compared.undecided.append("outputs: outputs_of_b hides which random array is which")
        return ()
    drawn = []
    for side in compared.sides:
        trial = side.trial
        assert trial is not None
        drawn.append(trial.noise(trial.weights, range(SEEDS)))
    distance = _distance(_means(drawn[0], orders[0]), orders, *drawn)
    wrong = [outcome for outcome in compared.differences if not outcome.ok and not outcome.note]
    if wrong and a.draws == b.draws and distance <= MOST:
        compared.undecided.append(
            f"{wrong[0].path} differs by {wrong[0].error:.1e} although both were given the same "
            "random numbers: they use them in another way or order, or differ by less than "
            f"{SEEDS} seeds show"
        )
    compared.differences = tuple(
        outcome
        if outcome.note
        else replace(outcome, error=0.0, precision="means and spreads over seeds")
        for outcome in compared.differences
    )
    return (Difference("outputs over seeds", distance, 1.0, MOST, precision=_ERRORS),)


def _orders(compared: Outputs, a: Call, b: Call) -> tuple[list[int], list[int]] | None:
    """Returns the indices of the paired arrays among the leaves of each output."""
    orders = []
    paths_of_both = [p.path for p in compared.pairs], [p.other for p in compared.pairs]
    for side, call, paths in zip(compared.sides, (a, b), paths_of_both, strict=True):
        numbers = {id(leaf): i for i, leaf in enumerate(call.leaves)}
        arrays = arrays_in(side.outputs(call.output))
        order = [numbers.get(id(arrays.get(path)), -1) for path in paths]
        if -1 in order:
            return None
        orders.append(order)
    return orders[0], orders[1]


def _means(runs: list[list[Any]], order: list[int]) -> list[Any]:
    """Returns the means of outputs over seeds, the best reference for spreads."""
    import numpy as np

    return [np.mean([np.asarray(outputs[i]) for outputs in runs], axis=0) for i in order]


def _distance(
    still: list[Any],
    orders: tuple[list[int], list[int]],
    ours: list[list[Any]],
    theirs: list[list[Any]],
) -> float:
    spreads = []
    for order, runs in zip(orders, (ours, theirs), strict=True):
        spread = Spread(still)
        for seed in range(SEEDS):
            outputs = runs[seed] if len(runs) > 1 else (runs[0] if runs else None)
            spread.add(still if outputs is None else [outputs[i] for i in order])
        spreads.append(spread)
    return spreads[0].distance(spreads[1].result())
