"""Compares two models in training: gradients, steps, and the arrays that calls change."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fmapper.errors import ConversionError
from fmapper.verification.arrays import UNITS, largest, move, widen
from fmapper.verification.differences import (
    OWN,
    Bounds,
    Difference,
    Pair,
    difference,
    measure,
)
from fmapper.verification.models.side import Side
from fmapper.verification.models.trial import Loss, Stepper, Trial
from fmapper.verification.optimizers import check_name, stepper
from fmapper.verification.pairing import Pairing, floats
from fmapper.verification.report import Parting, part_at

# In double precision: roundings of the weights, and the least effect of reordered sums on the
# largest element, in roundings.
MOVES_OF_DOUBLE = 2.0**-36
UNITS_OF_DOUBLE = 2.0**20
UNITS_OF_SUMS = 8.0  # in other precisions
RATES = (0.1, 0.01, 0.001, 1e-4, 1e-6, 1e-8)  # learning rates; the first that keeps roundings small
SMALL = 1e-4
SEEDS = (1, 2)


@dataclass(frozen=True)
class Plan:
    """The plan of a comparison in training.

    Attributes:
        make_losses: Returns the loss of each model.
        steps: How many steps of the optimiser.
        optimizers: The optimiser of each model: a name, or one of its framework.
        rate: The learning rate; None for one at which roundings stay small.
        rtol: As for `verify`.
        atol: As for `verify`.
    """

    make_losses: Callable[[], tuple[Loss, Loss]]
    steps: int = 0
    optimizers: tuple[Any, Any] = ("sgd", "sgd")
    rate: float | None = None
    rtol: float | None = None
    atol: float = 0.0

    @functools.cached_property
    def losses(self) -> tuple[Loss, Loss]:
        """The loss of each model, as a function of its output."""
        return self.make_losses()


@dataclass(slots=True)
class Course:
    """The course of a training; arrays have the names and the layouts of `a`.

    Attributes:
        loss: The loss before the first step.
        gradients: The gradients before the first step.
        states: The weights after each step, and running statistics that have changed.
        refused: Why the framework cannot differentiate the model; empty if it can.
    """

    loss: float = 0.0
    gradients: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    refused: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        import numpy as np

        return all(np.isfinite(x).all() for state in self.states for x in state.values())


@dataclass(slots=True)
class Trained:
    """The differences of two courses; see the attributes of `Report`."""

    loss: Difference | None = None
    gradients: tuple[Difference, ...] = ()
    steps: tuple[tuple[Difference, ...], ...] = ()
    undecided: list[str] = field(default_factory=list)

    def wrong(self) -> list[Difference]:
        """Returns the differences that are not allowed."""
        every = [outcome for group in (self.gradients, *self.steps) for outcome in group]
        every += [] if self.loss is None else [self.loss]
        return [outcome for outcome in every if not outcome.ok]

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.wrong()


@dataclass(slots=True)
class Measured:
    """The training of `a`, and how far it is from itself.

    Attributes:
        course: The training.
        rate: The learning rate.
        own: Gradients, and arrays after a step -> how much roundings of the weights change them.
        coarse: The same for roundings in single precision, computed in double precision.
    """

    course: Course
    rate: float
    own: dict[str, float] = field(default_factory=dict)
    coarse: Callable[[], dict[str, float]] = dict


def measure_training(trial: Trial, plan: Plan, unit: float, *, double: bool) -> Measured:
    """Trains `a`, and measures the effect of perturbed weights on its training.

    Args:
        trial: The model.
        plan: The plan of its training.
        unit: A rounding in its precision.
        double: Whether to compute in double precision.
    """
    weights = _weights(trial, double=double)

    def run(rate: float, off: float = 0.0, seed: int | None = None) -> Course:
        moved = {name: move(x, off, seed) for name, x in weights.items()}
        return _train(trial, moved, plan, 0, rate, None, double=double)

    def distances(course: Course, rate: float, off: float) -> dict[str, float]:
        spread: dict[str, float] = {}
        for seed in SEEDS:
            for key, distance in _distances(course, run(rate, off, seed)).items():
                spread[key] = max(spread.get(key, 0.0), distance)
        return spread

    for rate in RATES if plan.rate is None and plan.steps else (plan.rate or RATES[0],):
        course = run(rate)
        if course.refused:
            return Measured(course, rate)
        spread = distances(course, rate, MOVES_OF_DOUBLE if double else 2 * unit)
        scales = _scales(course)
        share = max(
            (spread[key] / x for key, x in scales.items() if x and key in spread), default=0.0
        )
        if course.is_finite and share <= SMALL:
            break
    return Measured(course, rate, spread, lambda: distances(course, rate, 2 * table_unit(unit)))


def table_unit(unit: float) -> float:
    """Returns a rounding of a model's tables, which stay rounded in double precision."""
    return min(unit, UNITS["float32"])


def compare_training(
    side: Side, trials: tuple[Trial, Trial], pairing: Pairing, plan: Plan, unit: float, *,
    double: bool,
) -> Trained:  # fmt: skip
    """Compares gradients and steps of two models.

    Args:
        side: The side of `a`.
        trials: The trials of both models.
        pairing: The pairing of their arrays.
        plan: The plan of the comparison.
        unit: A rounding in the precision in which both compute.
        double: Whether both can compute in double precision.
    """
    if double:
        try:
            return _compare(side, trials, pairing, plan, unit, double=True)
        except Exception:  # for example mixed dtypes: some code insists on single precision
            pass
    return _compare(side, trials, pairing, plan, unit, double=False)


def _compare(
    side: Side, trials: tuple[Trial, Trial], pairing: Pairing, plan: Plan, unit: float, *,
    double: bool,
) -> Trained:  # fmt: skip
    a, b = trials
    measured = side.recorded_course(double=double)
    measured = measured or measure_training(a, plan, unit, double=double)
    if measured.course.refused:
        return Trained(undecided=[f"gradients: a has none ({measured.course.refused})"])
    weights = _weights(b, double=double)
    theirs = _train(b, weights, plan, 1, measured.rate, pairing, double=double)
    if theirs.refused:
        note = f"b has none ({theirs.refused}), a has"
        return Trained(gradients=(Difference("gradients", math.inf, 0.0, 0.0, note),))
    units = UNITS_OF_DOUBLE if double else UNITS_OF_SUMS
    trained = _differ(trials, pairing, plan, measured, theirs, units, "float64" if double else "")
    if not double or plan.rtol is not None or trained.ok:
        return trained
    loose = replace(measured, own=measured.coarse())
    units = 8 * table_unit(unit) / UNITS["float64"]
    settled = _differ(trials, pairing, plan, loose, theirs, units, "float64")
    if not settled.ok:
        return trained
    worst = max(trained.wrong(), key=lambda outcome: outcome.share)
    settled.undecided.append(
        f"{worst.path} is off by {worst.share:.1e} of its largest element in float64, no more "
        "than a rounding in the models' own precision explains"
    )
    return settled


def _differ(
    trials: tuple[Trial, Trial], pairing: Pairing, plan: Plan, measured: Measured, theirs: Course,
    units: float, precision: str,
) -> Trained:  # fmt: skip
    ours = measured.course
    limits = {key: OWN * distance for key, distance in measured.own.items()}
    bounds = Bounds(plan.rtol, plan.atol, units, limits)
    trained = Trained()
    pair = Pair("loss", *_scalars(ours.loss, theirs.loss))
    trained.loss = difference(pair, bounds, precision)
    least = 1e-3 * max(map(largest, ours.gradients.values()), default=0.0)
    gradients = replace(bounds, least=least)
    trained.gradients = (*_gradients(trials, pairing, ours, theirs, gradients, plan, precision),)
    trained.steps = tuple(
        tuple(
            difference(Pair(f"step {number}: {n}", x, after[n]), replace(bounds, least=1e-6),
                       precision)
            for n, x in before.items()
            if n in after
        )
        for number, (before, after) in enumerate(zip(ours.states, theirs.states, strict=True), 1)
    )  # fmt: skip
    return trained


def _gradients(
    trials: tuple[Trial, Trial], pairing: Pairing, ours: Course, theirs: Course, bounds: Bounds,
    plan: Plan, precision: str,
) -> Iterable[Difference]:  # fmt: skip
    import numpy as np

    a, b = trials
    fixed = pairing.pull({name: np.zeros(x.shape) for name, x in b.fixed.items()})
    for name in a.weights:
        x = ours.gradients.get(name)
        y = theirs.gradients.get(name)
        x = np.zeros(a.weights[name].shape) if x is None else x
        note = ""
        if y is None:
            frozen = name in fixed
            y = np.zeros(x.shape)
            if largest(x) > 0:
                note = (
                    "a trains it, b does not" if frozen else "the loss of b does not depend on it"
                )
        yield difference(Pair(name, x, y, note), bounds, precision)
    if not isinstance(plan.optimizers[1], str):
        return  # an optimizer may leave weights as they are
    for name, held in {**floats(a.state), **a.fixed}.items():  # a weight that would be trained
        y = theirs.gradients.get(name)
        if y is not None and largest(y) > 0:
            yield Difference(name, largest(y), 0.0, 0.0, "b trains it, a does not",
                             held.size)  # fmt: skip


def _train(
    trial: Trial, weights: dict[str, Any], plan: Plan, side: int, rate: float,
    pairing: Pairing | None, *, double: bool,
) -> Course:  # fmt: skip
    """Trains a model; the pairing brings results to the names and layouts of `a`."""

    def pull(arrays: Mapping[str, Any], *, add: bool = False) -> dict[str, Any]:
        return dict(arrays) if pairing is None else pairing.pull(arrays, add=add)

    loss = plan.losses[side]
    step = _stepper(trial, plan.optimizers[side], rate)
    course = Course()
    state: Mapping[str, Any] | None = None
    start = floats(trial.state, double=double)
    fixed = floats(trial.fixed, double=double)
    for number in range(max(plan.steps, 1)):
        slope = trial.slope(weights, loss, state=state, double=double)
        if slope.refused:
            return Course(refused=slope.refused)
        if number == 0:
            course.loss = slope.loss
            course.gradients = pull(slope.gradients, add=True)
        if number < plan.steps:
            weights, state = step(weights, slope.gradients), slope.state
            now = floats(state, double=double)
            moved = {n: x for n, x in now.items() if _differs(x, start.get(n))}
            course.states.append(pull({**weights, **fixed, **(moved if pairing is None else now)}))
    return course


def _stepper(trial: Trial, optimizer: Any, rate: float) -> Stepper:
    if isinstance(optimizer, str):
        return stepper(optimizer, rate)
    chosen = trial.stepper(optimizer)
    if chosen is None:
        raise ConversionError(
            f"{type(optimizer).__name__} is not an optimizer of the framework of its model. Pass a "
            "torch.optim.Optimizer or a function that makes one for a module of torch, and a "
            "transformation of optax for a model of JAX."
        )
    return chosen


def check_optimizers(optimizer: Any) -> tuple[Any, Any]:
    """Returns the optimiser of each model.

    Raises:
        ConversionError: `optimizer` is neither a name nor a pair.
    """
    pair = optimizer if isinstance(optimizer, tuple) and len(optimizer) == 2 else None
    if pair is None and isinstance(optimizer, str):
        pair = (optimizer, optimizer)
    if pair is None or hasattr(optimizer, "update"):  # a transformation of optax is a tuple, too
        raise ConversionError(
            "optimizer takes a name, or a pair of an optimizer for a and one for b, such as "
            "(torch.optim.SGD(a.parameters(), 0.1), optax.sgd(0.1))."
        )
    for item in pair:
        if isinstance(item, str):
            check_name(item)
    optimizers: tuple[Any, Any] = pair
    return optimizers


def _weights(trial: Trial, *, double: bool) -> dict[str, Any]:
    return {name: widen(x) if double else x for name, x in trial.weights.items()}


def _differs(x: Any, before: Any) -> bool:
    if x is None or before is None:
        return x is not before
    return bool((widen(x) != widen(before)).any())


def _scalars(*values: float) -> tuple[Any, ...]:
    import numpy as np

    return tuple(np.asarray(value, np.float64) for value in values)


def _scales(course: Course) -> dict[str, float]:
    scales = {name: largest(x) for name, x in course.gradients.items()}
    top = max(scales.values(), default=0.0)
    scales = {name: max(x, 1e-3 * top) for name, x in scales.items()}
    for number, state in enumerate(course.states, 1):
        scales |= {f"step {number}: {name}": max(largest(x), 1e-6) for name, x in state.items()}
    return scales


def _distances(course: Course, other: Course) -> dict[str, float]:
    distances = {"loss": abs(course.loss - other.loss)}
    for name, x in course.gradients.items():
        distances[name] = _distance(x, other.gradients.get(name))
    for number, (before, after) in enumerate(zip(course.states, other.states, strict=False), 1):
        distances |= {
            f"step {number}: {name}": _distance(x, after.get(name)) for name, x in before.items()
        }
    return distances


def _distance(x: Any, y: Any) -> float:
    if y is None:
        return 0.0
    error, _, _, note = measure(x, y)
    return math.inf if note else error


def first_parting(trained: Trained, mode: str) -> Parting | None:
    """Returns the parameter of the backward pass, or the step, where the models first part.

    A backward pass reaches the last parameters first.
    """
    if trained.loss is not None and not trained.loss.ok:
        return part_at(trained.loss, "loss", mode=mode)
    wrong = [outcome for outcome in trained.gradients if not outcome.ok]
    if wrong:
        frozen = [outcome for outcome in wrong if outcome.note]
        return part_at(
            (frozen or wrong)[-1], "backward", name=(frozen or wrong)[-1].path, mode=mode
        )
    for number, step in enumerate(trained.steps, 1):
        off = [outcome for outcome in step if not outcome.ok]
        if off:
            worst = max(off, key=lambda outcome: outcome.share)
            name = worst.path.partition(": ")[2]
            return part_at(worst, "steps", name=name, step=number, mode=mode)
    return None


def compare_weights(
    trials: tuple[Trial, Trial], pairing: Pairing, plan: Plan
) -> tuple[Difference, ...]:
    """Compares the parameters before training."""
    a, b = trials
    ours, theirs = {**a.weights, **a.fixed}, pairing.pull({**b.weights, **b.fixed})
    names = [name for name in ours if name in theirs]
    bounds = Bounds(plan.rtol, plan.atol, 2.0)
    return tuple(
        difference(Pair(name, ours[name], theirs[name].astype(ours[name].dtype)), bounds)
        for name in names
    )


def compare_buffers(
    sides: tuple[Side, Side], pairing: Pairing, plan: Plan, unit: float, *, double: bool
) -> tuple[tuple[Difference, ...], list[str]]:
    """Compares the arrays besides parameters after a call; also says what could not be compared.

    Arrays that neither call changes, such as tables, are judged by the outputs.
    """
    states = [dict(call.state) for side in sides if (call := side.call(double=double)) is not None]
    trial = sides[0].trial
    assert trial is not None
    ours, theirs = floats(states[0], double=double), pairing.pull(floats(states[1], double=double))
    start = floats(trial.state)

    def compare(off: float, units: float) -> list[Difference]:
        spread = sides[0].sensitivity(off, double=double).state
        limits = {name: OWN * distance for name, distance in spread.items()}
        bounds = Bounds(plan.rtol, plan.atol, units, limits)
        pairs = [Pair(name, x, theirs[name]) for name, x in ours.items() if name in theirs]
        return [difference(pair, bounds, "float64" if double else "") for pair in pairs]

    moves = (MOVES_OF_DOUBLE, UNITS_OF_DOUBLE) if double else (2 * unit, UNITS_OF_SUMS)
    other = sides[1].trial
    assert other is not None
    before = pairing.pull(floats(other.state))
    changed = {
        name
        for name in ours
        if _differs(ours[name], start.get(name)) or _differs(theirs.get(name), before.get(name))
    }
    every = compare(*moves)
    outcomes = [outcome for outcome in every if outcome.ok or outcome.path in changed]
    lacking = [
        f"{name}: a call of a changes it, and it has no partner among the arrays of b"
        for name, x in ours.items()
        if name not in theirs and _differs(x, start.get(name))
    ]
    lacking += [
        f"{outcome.path} differs by {outcome.share:.1e} of its largest element, and no call "
        "changes it"
        for outcome in every
        if not outcome.ok and outcome.path not in changed
    ]
    if double and plan.rtol is None and not all(outcome.ok for outcome in outcomes):
        unit = table_unit(unit)
        settled = [
            outcome
            for outcome in compare(2 * unit, 8 * unit / UNITS["float64"])
            if outcome.ok or outcome.path in changed
        ]
        if all(outcome.ok for outcome in settled):
            off = max(
                (outcome for outcome in outcomes if not outcome.ok),
                key=lambda outcome: outcome.share,
            )
            lacking.append(
                f"{off.path} is off by {off.share:.1e} of its largest element in float64, no more "
                "than a rounding in the models' own precision explains"
            )
            outcomes = settled
    return tuple(outcomes), lacking
