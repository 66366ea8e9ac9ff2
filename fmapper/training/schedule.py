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
        """Returns the learning rate at a step of the schedule.

        Args:
            base: The value that the schedule scales: the rate of a group.
            step: How many steps it has made: an int; or an array, with `xp`.
            xp: The array namespace of `step`; None for numbers.
        """
        import numpy as np

        return SCHEDULES[self.kind](base, step, xp or np, **self.settings)


def constant(base: float, step: Any, xp: Any, *, factor: float, total_iters: int) -> Any:
    """Scales the rate until `total_iters`."""
    return base * xp.where(step < total_iters, factor, 1.0)


def linear(
    base: float, step: Any, xp: Any, *, start_factor: float, end_factor: float, total_iters: int
) -> Any:
    """Changes a factor linearly: a warm-up."""
    share = xp.minimum(step, total_iters) / total_iters
    return base * (start_factor + (end_factor - start_factor) * share)


def step(base: float, step: Any, xp: Any, *, gamma: float, step_size: int = 1) -> Any:
    """Scales the rate by `gamma` at every `step_size`-th step."""
    return base * xp.power(gamma, xp.floor(step / step_size))


def milestones(base: float, step: Any, xp: Any, *, milestones: Any, gamma: float) -> Any:
    """Scales the rate by `gamma` at milestones."""
    return base * xp.power(gamma, sum(xp.where(step >= at, 1.0, 0.0) for at in milestones))


def polynomial(base: float, step: Any, xp: Any, *, total_iters: int, power: float) -> Any:
    """Lets the rate fall to 0 as a power of the steps that are left."""
    return base * xp.power(1.0 - xp.minimum(step, total_iters) / total_iters, power)


def cosine(base: float, step: Any, xp: Any, *, T_max: int, eta_min: float) -> Any:
    """Swings between `base` and `eta_min`."""
    return eta_min + (base - eta_min) * (1.0 + xp.cos(math.pi * step / T_max)) / 2.0


def restarts(base: float, step: Any, xp: Any, *, T_0: int, T_mult: int, eta_min: float) -> Any:
    """Begins a cosine anew, each time `T_mult` times as long."""
    if T_mult == 1:
        share = step / T_0 - xp.floor(step / T_0)
    else:
        # A rounding must not put a step that begins a cycle into the one before.
        cycle = xp.floor(xp.log(step / T_0 * (T_mult - 1) + 1.0) / math.log(T_mult) + 1e-5)
        length = T_0 * xp.power(float(T_mult), cycle)
        share = (step - T_0 * (xp.power(float(T_mult), cycle) - 1.0) / (T_mult - 1)) / length
    return eta_min + (base - eta_min) * (1.0 + xp.cos(math.pi * share)) / 2.0


def onecycle(
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


def table(base: float, step: Any, xp: Any, *, values: Any) -> Any:
    """Looks factors up that were computed one by one; the last one holds from then on."""
    return base * xp.asarray(values)[xp.asarray(xp.minimum(step, len(values) - 1), int)]


def factor(base: float, step: Any, xp: Any, *, function: Any) -> Any:
    """Calls a function that gives a factor: of Python, or a schedule of optax."""
    return base * (xp.call(function, step) if hasattr(xp, "call") else function(int(step)))


def sequence(base: float, step: Any, xp: Any, *, schedules: Any, milestones: Any) -> Any:
    """Joins schedules, each counted from its milestone."""
    rate = schedules[0].rate(base, step, xp)
    for schedule, begin in zip(schedules[1:], milestones, strict=True):
        later = schedule.rate(base, xp.maximum(step - begin, 0), xp)
        rate = xp.where(step >= begin, later, rate)
    return rate


SCHEDULES: dict[str, Callable[..., Any]] = {
    "ConstantLR": constant, "LinearLR": linear, "StepLR": step, "MultiStepLR": milestones,
    "ExponentialLR": step, "PolynomialLR": polynomial, "CosineAnnealingLR": cosine,
    "CosineAnnealingWarmRestarts": restarts, "OneCycleLR": onecycle, "SWALR": onecycle,
    "SequentialLR": sequence, "LambdaLR": factor, "table": table,
}  # fmt: skip
