"""Learning rates, and other settings, as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate, or another setting, that changes with the step, in closed form.

    Attributes:
        kind: A key of `SCHEDULES`: the name of a class of `torch.optim.lr_scheduler`, or `table`,
            of factors.
        settings: The arguments of its function, which are attributes of that class.
        position: How many updates of the parameters it has seen.
        every: How many of them make a step of the schedule: the batches of an epoch, where the rate
            changes once an epoch.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    position: int = 0
    every: int = 1

    def rate(self, base: float, step: Any, xp: Any = None) -> Any:
        """Returns the value at a step: of a number, or of an array with its namespace."""
        import numpy as np

        return SCHEDULES[self.kind](base, step, xp or np, **self.settings)


def _restarts(base: float, step: Any, xp: Any, *, T_0: int, T_mult: int, eta_min: float) -> Any:
    if T_mult == 1:
        share = step / T_0 - xp.floor(step / T_0)
    else:
        # A rounding must not put a step that begins a cycle into the one before.
        cycle = xp.floor(xp.log(step / T_0 * (T_mult - 1) + 1.0) / math.log(T_mult) + 1e-5)
        length = T_0 * xp.power(float(T_mult), cycle)
        share = (step - T_0 * (xp.power(float(T_mult), cycle) - 1.0) / (T_mult - 1)) / length
    return eta_min + (base - eta_min) * (1.0 + xp.cos(math.pi * share)) / 2.0


def _one_cycle(
    base: float, step: Any, xp: Any, *, phases: Any, factors: Mapping[str, float], linear: bool
) -> Any:
    """Follows the one-cycle policy: phases of (last step, name of the factor at each end)."""
    rate, begin = base * factors[phases[0][1]], 0.0
    for end, first, last in phases:
        low, high = factors[first], factors[last]
        share = xp.minimum(xp.maximum((step - begin) / (end - begin), 0.0), 1.0)
        share = share if linear else (1.0 - xp.cos(math.pi * share)) / 2.0
        rate = xp.where(step >= begin, base * (low + (high - low) * share), rate)
        begin = end
    return rate


def _sequence(base: float, step: Any, xp: Any, *, schedules: Any, milestones: Any) -> Any:
    rate = schedules[0].rate(base, step, xp)
    for schedule, begin in zip(schedules[1:], milestones, strict=True):
        later = schedule.rate(base, xp.maximum(step - begin, 0), xp)
        rate = xp.where(step >= begin, later, rate)
    return rate


# Functions of the value that is scaled, the step and the namespace. Their other arguments are
# the settings of a `Schedule`, which a scheduler of torch has as attributes.
SCHEDULES: dict[str, Callable[..., Any]] = {
    "ConstantLR": lambda base, step, xp, *, factor, total_iters: (
        base * xp.where(step < total_iters, factor, 1.0)
    ),
    "LinearLR": lambda base, step, xp, *, start_factor, end_factor, total_iters: (
        base
        * (start_factor + (end_factor - start_factor) * xp.minimum(step, total_iters) / total_iters)
    ),
    "StepLR": lambda base, step, xp, *, gamma, step_size: (
        base * xp.power(gamma, xp.floor(step / step_size))
    ),
    "ExponentialLR": lambda base, step, xp, *, gamma: base * xp.power(gamma, step),
    "MultiStepLR": lambda base, step, xp, *, milestones, gamma: (
        base * xp.power(gamma, sum(xp.where(step >= at, 1.0, 0.0) for at in milestones))
    ),
    "PolynomialLR": lambda base, step, xp, *, total_iters, power: (
        base * xp.power(1.0 - xp.minimum(step, total_iters) / total_iters, power)
    ),
    "CosineAnnealingLR": lambda base, step, xp, *, T_max, eta_min: (
        eta_min + (base - eta_min) * (1.0 + xp.cos(math.pi * step / T_max)) / 2.0
    ),
    "CosineAnnealingWarmRestarts": _restarts,
    "OneCycleLR": _one_cycle,
    "SWALR": _one_cycle,
    "SequentialLR": _sequence,
    # A function of Python, or a schedule of optax, that gives factors.
    "LambdaLR": lambda base, step, xp, *, function: (
        base * (xp.call(function, step) if hasattr(xp, "call") else function(int(step)))
    ),
    # Factors that were computed one by one; the last one holds from then on.
    "table": lambda base, step, xp, *, values: (
        base * xp.asarray(values)[xp.asarray(xp.minimum(step, len(values) - 1), int)]
    ),
}
