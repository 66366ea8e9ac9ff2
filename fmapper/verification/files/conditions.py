"""Finds conditions under which a model's results are certain enough to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# The contract of a translation: relative to the largest element; for dropout in standard errors.
LIMITS = {"outputs": 1e-4, "gradients": 1e-3, "steps": 1e-3, "draws": 0.0, "dropout": 6.0}
SEEDS = 256  # for dropout
# How much a model amplifies a rounding of its weights limits its translation: it may be off by that
# much, times this; a model further from itself than this cannot be proved.
OWN, MOST = 4.0, 0.01
# How far to move the weights if a rounding of them changes outputs or gradients by more than
# `MOST`, for example if a grid is sampled at its own points, where the interpolation bends, or for
# the logarithm of a determinant that is 1.
AWAY = 2.0**-6
# How far a rounding moves the weights. In double precision it is one of sums that a framework takes
# in another order: a variance as the mean of squares less the square of the mean loses so much.
ROUNDING = {"single": 2.0**-22, "double": 2.0**-36}
RATES = (0.1, 0.01, 0.001, 1e-4, 1e-6, 1e-8)  # learning rates; the first that keeps roundings small
_FEW = (4, 16)  # roundings of the weights within which to look for a bend if a proof fails
_WORDS = {"output": "outputs", "gradient": "gradients", "after": "steps"}

# Runs and trains a model; see `descent`.
Run = Callable[..., dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a model and its file are compared.

    Attributes:
        away: How far to move the weights first, relative to themselves.
        double: Whether to compute in double precision.
    """

    away: float = 0.0
    double: bool = False

    @property
    def rounding(self) -> float:
        """How far a rounding moves the weights, relative to themselves."""
        return ROUNDING["double" if self.double else "single"]

    def run(self, run: Run, rate: float, off: float = 0.0) -> dict[str, Any]:
        """Runs and trains a model; `off` moves its weights further."""
        return run(rate, self.away + off, double=self.double)

    def draw(self, run: Run) -> dict[float, list[list[Any]]]:
        """Returns the outputs of a model in training for each seed; see `descent`."""
        draw: Callable[..., Any] = run
        drawn: dict[float, list[list[Any]]]
        drawn = draw(0.0, self.away, double=self.double, seeds=range(SEEDS))
        return drawn


CHOICES = (
    Conditions(),
    Conditions(away=AWAY),
    Conditions(double=True),
    Conditions(away=AWAY, double=True),
)


@dataclass(frozen=True, slots=True)
class Results:
    """Outputs, gradients and steps of a model, and how certain they are.

    Attributes:
        found: The result of `descent`, and the learning `rate`.
        own: `outputs`, `gradients`, `steps` -> how far the model is from itself with weights off by
            a rounding.
    """

    found: Mapping[str, Any]
    own: Mapping[str, float]

    @property
    def are_smooth(self) -> bool:
        """Whether roundings of the weights change outputs and gradients by little."""
        return max(self.own["outputs"], self.own["gradients"]) <= MOST

    @property
    def are_certain(self) -> bool:
        """Whether roundings change them by less than the contract allows a file to be off."""
        return all(OWN * distance <= LIMITS[what] for what, distance in self.own.items())


def learn_modes(
    runs: Mapping[str, Run], *, double: bool = False
) -> Iterator[tuple[Conditions, dict[str, Results]]]:
    """Yields conditions for comparing a model and its file, and results in each mode.

    Conditions in double precision come first, if only they bring a model as near to itself as the
    contract requires of its file: deep networks with batch norms, for instance, amplify a rounding
    a million times while they train on few images, so that in single precision a model differs from
    itself by 20 %. Then come conditions in single precision under which roundings change little; or
    the weights as they are, if there are none.

    Args:
        runs: Modes -> the function that runs and trains the model.
        double: Whether to compute in double precision alone.
    """
    smooth: list[tuple[Conditions, dict[str, Results]]] = []
    for conditions in CHOICES if not double else [one for one in CHOICES if one.double]:
        results: dict[str, Results] = {}
        try:
            for mode in sorted(runs, reverse=True):  # training amplifies roundings more
                results[mode] = learn(runs[mode], conditions)
                if not results[mode].are_smooth:
                    break
        except Exception:  # such as of a matrix in single precision among others
            if not conditions.double:
                raise
            continue
        results = {mode: results[mode] for mode in runs if mode in results}
        if all(result.are_certain for result in results.values()):
            yield conditions, results
            yield from smooth if conditions.double and not double else ()
            return
        if (
            all(result.are_smooth for result in results.values())
            and conditions.double is double
            and not smooth
        ):
            smooth.append((conditions, results))
    yield from smooth or [learn_plainly(runs, double=double)]


def learn_plainly(
    runs: Mapping[str, Run], *, double: bool = False
) -> tuple[Conditions, dict[str, Results]]:
    """Returns the results with the weights as they are, certain or not."""
    plain = Conditions(double=double)
    return plain, {mode: learn(run, plain, all_rates=True) for mode, run in runs.items()}


def learn(run: Run, conditions: Conditions, *, all_rates: bool = False) -> Results:
    """Returns the results and the training of a model, and its sensitivity to rounding.

    The learning rate is so small that no step amplifies a rounding of the weights: otherwise a
    wrong program could not be distinguished from a rounding.

    Args:
        run: Runs and trains the model.
        conditions: The conditions.
        all_rates: Whether to look for that rate even if a rounding changes outputs or gradients by
            much.
    """
    import numpy as np

    for rate in RATES:
        values = conditions.run(run, rate)
        sensitivity = dict.fromkeys(_WORDS.values(), 0.0)
        if rate != RATES[-1] and not _is_finite(values):
            continue
        for off in (conditions.rounding, -conditions.rounding):  # a bend may be on either side
            for what, distance in find_distances(values, conditions.run(run, rate, off)).items():
                sensitivity[what] = max(sensitivity[what], distance)
            is_small = sensitivity["steps"] <= LIMITS["steps"] / 10
            if not is_small and rate != RATES[-1]:
                break
        results = Results(values | {"rate": np.array(rate)}, sensitivity)
        if is_small or not (results.are_smooth or all_rates):
            break
    return results


def _is_finite(values: Mapping[str, Any]) -> bool:
    """Returns whether all values after the steps are finite."""
    import numpy as np

    return all(np.isfinite(x).all() for key, x in values.items() if key.startswith("after."))


def are_at_bends(
    runs: Mapping[str, Run], results: Mapping[str, Results], conditions: Conditions,
    errors: Mapping[str, float], bounds: Mapping[str, float],
) -> bool:  # fmt: skip
    """Returns whether a few roundings of the weights explain the errors of gradients.

    For example, the input of a ReLU may be within some roundings of zero.
    """
    for what, error in errors.items():
        mode, _, kind = what.rpartition(" ")
        if error <= bounds[what]:
            continue
        if kind not in ("gradients", "steps"):
            return False
        values, distance = results[mode].found, 0.0
        for times in _FEW:
            for sign in (1, -1):
                off = sign * times * conditions.rounding
                again = conditions.run(runs[mode], float(values["rate"]), off)
                distance = max(distance, find_distances(values, again)[kind])
        if OWN * distance < error:
            return False
    return True


def find_distances(values: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Returns the largest relative distances of outputs, gradients and steps from others."""
    import numpy as np

    gradients = [gradient for key, gradient in values.items() if key.startswith("gradient.")]
    largest = max(map(_largest, gradients), default=0.0)
    least = {"output": 1e-6, "gradient": 1e-3 * largest, "after": 1e-3}
    distances = dict.fromkeys(_WORDS.values(), 0.0)
    for key, value in values.items():
        kind = key.partition(".")[0]
        if kind not in _WORDS:
            continue
        distance = _distance(other.get(key, value), value, least[kind])
        if kind == "after" and not np.isfinite(value).all():
            distance = 1.0  # not finite
        distances[_WORDS[kind]] = max(distances[_WORDS[kind]], distance)
    return distances


def _largest(array: Any) -> float:
    import numpy as np

    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


def _distance(array: Any, wanted: Any, least: float) -> float:
    """Returns the relative distance of numbers; 1 if one is not finite."""
    import numpy as np

    if array.shape != wanted.shape or array.dtype.kind not in "fc":
        return 0.0
    finite = np.isfinite(wanted)
    distances = np.abs(array[finite] - wanted[finite])
    distances = np.where(np.isfinite(distances), distances, 1.0)
    return float(distances.max(initial=0.0) / max(_largest(wanted), least, 1e-30))
