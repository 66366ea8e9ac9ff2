"""An optimizer as plain data, which every framework's adapter can read and write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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


class Algorithm(NamedTuple):
    """An algorithm of `torch.optim`: https://docs.pytorch.org/docs/stable/optim.html."""

    settings: Mapping[str, Any]  # beside `lr`, with the values that leave a part of it out
    slots: Mapping[str, str | None]  # of each parameter -> the setting that asks for it; or None


_DECAY = {"weight_decay": 0.0, "maximize": False}
_ADAM = {"betas": None, "eps": None, "decoupled": False, **_DECAY}
_MEANS = {"exp_avg": None, "exp_avg_sq": None}
# By the names of the classes of torch in lower case.
ALGORITHMS = {
    "sgd": Algorithm(
        {"momentum": 0.0, "dampening": 0.0, "nesterov": False, **_DECAY},
        {"momentum_buffer": "momentum"},
    ),
    "adam": Algorithm({**_ADAM, "amsgrad": False}, {**_MEANS, "max_exp_avg_sq": "amsgrad"}),
    "adamax": Algorithm({"betas": None, "eps": None, **_DECAY}, {"exp_avg": None, "exp_inf": None}),
    "nadam": Algorithm({**_ADAM, "momentum_decay": None}, _MEANS),
    "radam": Algorithm(_ADAM, _MEANS),
    "rmsprop": Algorithm(
        {"alpha": None, "eps": None, "momentum": 0.0, "centered": False, **_DECAY},
        {"square_avg": None, "grad_avg": "centered", "momentum_buffer": "momentum"},
    ),
    "adagrad": Algorithm({"lr_decay": 0.0, "eps": None, **_DECAY}, {"sum": None}),
    "adadelta": Algorithm(
        {"rho": None, "eps": None, **_DECAY}, {"square_avg": None, "acc_delta": None}
    ),
    "adafactor": Algorithm(
        {"beta2_decay": None, "eps": None, "d": None, **_DECAY},
        {"row_var": None, "col_var": None, "variance": None},
    ),
    "muon": Algorithm(
        {"momentum": None, "nesterov": None, "ns_coefficients": None, "ns_steps": None}
        | {"eps": None, "adjust_lr_fn": None, "weight_decay": 0.0},
        {"momentum_buffer": None},
    ),
    # Of the weights: the updates are the parameters, and there is no rate.
    "average": Algorithm({"kind": None, "decay": None}, {"average": None}),
}
BY_AXES = ("adafactor", "muon")  # which tell rows of a parameter from columns


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters with the same settings, the same schedule and the same number of steps.

    Attributes:
        members: The positions of the parameters among those of the model.
        settings: `lr`, the base of the schedule if there is one, and those of the algorithm. And
            `axes`, where an algorithm of `BY_AXES` takes the axes of the parameters in another
            order. Slots of another shape than the parameter's have that order already.
        step: How often they have been updated; 0 or 1 for SGD in torch, which does not count.
        numbers: State that is one number for each parameter: `mu_product` of NAdam.
        schedules: How settings change: `lr`, and `momentum` or the first of the `betas`.
    """

    members: tuple[int, ...]
    settings: Mapping[str, Any]
    step: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)
    schedules: Mapping[str, Schedule] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer and what it has gathered about the parameters of a model.

    Attributes:
        algorithm: A key of `ALGORITHMS`.
        groups: The parameters that it updates.
        slots: Arrays of the shape of their parameter: `exp_avg` -> position -> array. A parameter
            that was never updated has none.
    """

    algorithm: str
    groups: tuple[Group, ...]
    slots: Mapping[str, Mapping[int, Any]]
