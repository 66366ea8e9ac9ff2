"""An optimizer as plain data, which every framework's adapter can read and write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fmapper.training.schedule import Schedule


class Algorithm(NamedTuple):
    """An algorithm of `torch.optim`: https://docs.pytorch.org/docs/stable/optim.html.

    Attributes:
        settings: Those beside `lr`, with the values that leave a part of it out.
        slots: The arrays of each parameter -> the setting that asks for them; None for always.
    """

    settings: Mapping[str, Any]
    slots: Mapping[str, str | None]


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
