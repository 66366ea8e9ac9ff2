"""An optimizer as plain data, which every framework's adapter can read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fmapper.errors import ConversionError
from fmapper.training.schedule import Schedule

# The settings of each algorithm beside `lr`, with the values that leave a part of it out. Their
# names and meaning are those of torch.optim: https://docs.pytorch.org/docs/stable/optim.html.
_DECAY = {"weight_decay": 0.0, "maximize": False}
# fmt: off
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "dampening": 0.0, "nesterov": False, **_DECAY},
    "adam": {"betas": None, "eps": None, "amsgrad": False, "decoupled": False, **_DECAY},
    "adamax": {"betas": None, "eps": None, **_DECAY},
    "nadam": {"betas": None, "eps": None, "momentum_decay": None, "decoupled": False, **_DECAY},
    "radam": {"betas": None, "eps": None, "decoupled": False, **_DECAY},
    "rmsprop": {"alpha": None, "eps": None, "momentum": 0.0, "centered": False, **_DECAY},
    "adagrad": {"lr_decay": 0.0, "eps": None, **_DECAY},
    "adadelta": {"rho": None, "eps": None, **_DECAY},
    "adafactor": {"beta2_decay": None, "eps": None, "d": None, **_DECAY},
    "muon": {
        "momentum": None, "nesterov": None, "ns_coefficients": None, "ns_steps": None,
        "eps": None, "adjust_lr_fn": None, **_DECAY,
    },
    "average": {"kind": None, "decay": None},  # of the weights: no updates, and no rate
}
# fmt: on
BY_AXES = ("adafactor", "muon")  # which tell rows of a parameter from columns


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters with the same settings, the same schedule and the same number of steps.

    Attributes:
        members: The positions of the parameters among those of the model.
        settings: `lr`, the base of the schedule if there is one, and those of `SETTINGS`.
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
        algorithm: A key of `SETTINGS`.
        groups: The parameters that it updates.
        slots: Arrays of the shape of their parameter: `exp_avg` -> position -> array. A parameter
            that was never updated has none.
        axes: Of the algorithms of `BY_AXES`: position -> the axes of the parameter in the order in
            which the algorithm takes them. Slots of another shape than the parameter's have that
            order already.
        warnings: What the user has to do, as the other framework does it outside of optimizers.
    """

    algorithm: str
    groups: tuple[Group, ...]
    slots: Mapping[str, Mapping[int, Any]]
    axes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def at(self, places: Sequence[int]) -> OptimizerState:
        """Returns the state with its parameters at other positions: those of a larger model."""
        return replace(
            self,
            groups=tuple(
                replace(group, members=tuple(places[at] for at in group.members))
                for group in self.groups
            ),
            slots={
                slot: {places[at]: array for at, array in arrays.items()}
                for slot, arrays in self.slots.items()
            },
            axes={places[at]: axes for at, axes in self.axes.items()},
        )


def check_settings(
    optimizer: str, settings: Mapping[str, Any], known: Mapping[str, Any], advice: str = ""
) -> None:
    """Raises for settings that another framework's optimizer does not have.

    Args:
        optimizer: Its name, for the message.
        settings: Its settings.
        known: The values that settings must have, where the other framework has no choice.
        advice: What to do instead.

    Raises:
        ConversionError: A setting has another value; names all that have.
    """
    wrong = [
        f"{name}={settings[name]!r} (only {value!r})"
        for name, value in known.items()
        if settings.get(name, value) != value
    ]
    if wrong:
        raise ConversionError(
            f"{optimizer}: there is no counterpart for {', '.join(wrong)}. {advice}".rstrip()
        )
