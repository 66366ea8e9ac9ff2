"""Optimizers of `torch.optim`, with their state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

from fmapper import ConversionError, ConversionWarning
from fmapper.backends import warn
from fmapper.training import ALGORITHMS, Group, OptimizerState, Schedule
from fmapper_adapters.torch.training import averages, schedulers

_CLASSES: dict[str, Any] = {
    cls.__name__.lower(): cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and cls.__name__.lower() in {*ALGORITHMS, "adamw"}
}
_NUMBERS = {"nadam": ("mu_product",)}  # state that is a number for each parameter
_DECOUPLED = "decoupled_weight_decay"
# Settings that say how it is computed, not what; and what schedulers keep in groups.
_HOW = {
    "params", "lr", "initial_lr", "initial_accumulator_value", "foreach", "fused", "capturable",
    "differentiable", "param_names", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr",
}  # fmt: skip
_EXCHANGED = {"row_var": "col_var", "col_var": "row_var"}
_UNCOUNTED = ("sgd", "muon")  # which keep no count of their steps
# torch has no public names for what registers itself there.
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_WHY_NOT = {
    "LBFGS": "it evaluates the loss many times in a step",
    "SparseAdam": "JAX has no sparse gradients",
    "ASGD": "optax has no averaged SGD",
    "Rprop": "it is for whole batches, and optax's has other state",
}


def read(
    model: torch.nn.Module, optimizer: Any, scheduler: Any, every: int | None
) -> OptimizerState:
    """Returns an optimizer as plain data; see `Optimizers.read_optimizer`."""
    if isinstance(optimizer, torch.optim.swa_utils.AveragedModel):
        if scheduler is not None:
            raise ConversionError("AveragedModel: has no rate, and so no scheduler")
        return averages.read(model, optimizer)
    name = type(optimizer).__name__
    if type(optimizer) is not _CLASSES.get(name.lower()):
        why = _WHY_NOT.get(name, "its class is not one of torch.optim that both sides have")
        raise ConversionError(
            f"{name} cannot be converted: {why}. Convert the model alone, and begin a new "
            "optimizer in the other framework."
        )
    algorithm = "adam" if name == "AdamW" else name.lower()
    extra = {"decoupled": True} if name == "AdamW" else {}
    slot_names, number_names = ALGORITHMS[algorithm].slots, _NUMBERS.get(algorithm, ())
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise ConversionError(f"{type(scheduler).__name__}: is the scheduler of another optimizer")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {id(parameter): at for at, parameter in enumerate(model.parameters())}
    found: dict[Any, list[int]] = defaultdict(list)
    settings: dict[int, dict[str, Any]] = {}
    slots: dict[str, dict[int, Any]] = defaultdict(dict)
    has_hooks = any(getattr(optimizer, name, None) for name in _STEP_HOOKS)
    problems = ["it has hooks of its steps, which would be lost"] * has_hooks
    for number, group in enumerate(optimizer.param_groups):
        settings[number] = {**extra, **_settings(group, scheduler)}
        for parameter in group["params"]:
            at = places.get(id(parameter))
            if at is None:
                raise ConversionError(
                    f"{name}: a parameter of shape {tuple(parameter.shape)} in group {number} is "
                    "not one of the model. Pass the model that the optimizer was made for."
                )
            state = optimizer.state.get(parameter, {})
            problem = _problem(algorithm, parameter, state)
            if problem is not None:
                problems.append(f"{names[id(parameter)]}: {problem}")
            if problem is not None or not parameter.requires_grad:  # torch does not update it
                continue
            for slot in slot_names:
                if state.get(slot) is not None:
                    slots[slot][at] = state[slot].detach()
            numbers = tuple(float(state[key]) for key in number_names if key in state)
            # SGD does not count its steps: that there was one matters for its first momentum.
            step = int(state.get("step", state.get("momentum_buffer") is not None))
            found[number, step, numbers].append(at)
    steps = max((step for _, step, _ in found), default=0)
    schedules: list[dict[str, Schedule]] = [{}] * len(settings)
    if scheduler is not None:
        counted = None if algorithm in _UNCOUNTED else steps
        schedules = schedulers.read(scheduler, counted, every)
        _check_rates(optimizer, settings, schedules)
    groups = tuple(
        Group(
            tuple(at), settings[number], step, dict(zip(number_names, numbers, strict=False)),
            schedules[number],
        )
        for (number, step, numbers), at in found.items()
    )  # fmt: skip
    parameters = [*model.parameters()]
    has_gradients = any(parameters[at].grad is not None for g in groups for at in g.members)
    problems += [
        f"{names[id(parameters[at])]}: has had no gradient in the steps of the others, so that "
        "torch leaves it as it is, and weight decay changes it where gradients are 0 instead. "
        "Leave it out of the optimizer; if it was frozen until now, make one step in torch first"
        for group in groups
        for is_stateless in (algorithm == "sgd" and not group.settings["momentum"],)
        for at in group.members
        if group.settings["weight_decay"]
        and (
            steps > group.step == 0
            or (is_stateless and has_gradients and parameters[at].grad is None)
        )
    ]
    if problems:
        raise ConversionError(f"{name} cannot be converted:\n  " + "\n  ".join(problems))
    if scheduler is None and any("initial_lr" in group for group in optimizer.param_groups):
        message = (
            f"{name} has a scheduler, which was not passed: the rate stays as it is now. Pass "
            "scheduler= for it to go on."
        )
        warn(message, ConversionWarning)
    return OptimizerState(algorithm, groups, dict(slots))


def _problem(algorithm: str, parameter: torch.Tensor, state: Mapping[str, Any]) -> str | None:
    """Returns what would be lost of a parameter."""
    slots = ALGORITHMS[algorithm].slots
    unknown = state.keys() - {"step", *slots, *_NUMBERS.get(algorithm, ())}
    dtypes = {state[slot].dtype for slot in slots if state.get(slot) is not None}
    problems = {
        f"unknown state {', '.join(sorted(unknown))}": unknown,
        "is complex, and gradients of complex numbers are others in JAX": parameter.is_complex(),
        f"its moments are of {', '.join(map(str, dtypes))}, and it is of {parameter.dtype}": dtypes
        - {parameter.dtype},
        "has hooks of its gradient, which would be lost": any(
            getattr(parameter, name, None) for name in _GRADIENT_HOOKS
        ),
        "is frozen, so that its moments would be lost. Delete them from optimizer.state, or set "
        "requires_grad": state and not parameter.requires_grad,
    }
    return next((problem for problem, holds in problems.items() if holds), None)


def _check_rates(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[int, Mapping[str, Any]],
    schedules: Sequence[Mapping[str, Schedule]],
) -> None:
    """Raises where a schedule does not give the rates that the groups have."""
    for number, group in enumerate(optimizer.param_groups):
        schedule = schedules[number]["lr"]
        step = schedule.position // schedule.every
        expected = schedule.rate(settings[number]["lr"], step)
        if not math.isclose(float(group["lr"]), expected, rel_tol=1e-6, abs_tol=1e-12):
            raise ConversionError(
                f"{type(optimizer).__name__}: group {number} has the rate {float(group['lr'])}, "
                f"and its scheduler gives {expected} after {step} steps: something else has set "
                "the rate, or the scheduler is not one of this optimizer"
            )


def _settings(group: Mapping[str, Any], scheduler: Any) -> dict[str, Any]:
    """Returns the settings of a group, with the rate and momentum that a schedule begins with."""
    values = {
        "decoupled" if key == _DECOUPLED else key: _plain(value)
        for key, value in group.items()
        if key not in _HOW
    }
    values["lr"] = float(group["lr"] if scheduler is None else group.get("initial_lr", group["lr"]))
    if type(scheduler) is OneCycleLR and scheduler.cycle_momentum:
        first = float(group["max_momentum"])
        has_betas = "betas" in group
        values |= {"betas": (first, values["betas"][1])} if has_betas else {"momentum": first}
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def write(model: torch.nn.Module, state: OptimizerState) -> tuple[Any, Any]:
    """Returns an optimizer of torch and a scheduler; see `Optimizers.write_optimizer`."""
    if state.algorithm == "average":
        return averages.write(model, state), None
    parameters = [*model.parameters()]
    merged: list[tuple[dict[str, Any], Mapping[str, Schedule], list[int]]] = []
    for group in state.groups:  # torch counts for each parameter
        settings = {name: value for name, value in group.settings.items() if name != "axes"}
        alike = (each for each in merged if each[:2] == (settings, group.schedules))
        members = next(alike, None)
        if members is None:
            merged.append(members := (settings, group.schedules, []))
        members[2].extend(group.members)
    if not merged:
        raise ConversionError("no parameter is updated, and torch has no optimizer of nothing")
    cls, names = _CLASSES[state.algorithm], {"decoupled": _DECOUPLED}
    decoupled = {x.get("decoupled", False) for x, *_ in merged if x.get("weight_decay")}
    if state.algorithm == "adam" and decoupled == {True}:
        cls, names = torch.optim.AdamW, {"decoupled": ""}
    groups = [
        {"params": [parameters[at] for at in sorted(members)]}
        | {name: x for key, x in settings.items() if (name := names.get(key, key))}
        for settings, _, members in merged
    ]
    known = {"lr", _DECOUPLED, *ALGORITHMS[state.algorithm].settings}
    defaults = {name: value for name, value in groups[0].items() if name in known}
    optimizer = cls(groups, **defaults)  # beside the defaults users name their groups
    for group in state.groups:
        axes = group.settings.get("axes")
        if axes is not None and (axes, state.algorithm) != ((1, 0), "adafactor"):
            raise ConversionError(
                f"{state.algorithm} takes the axes of parameter {group.members[0]} in the order "
                f"{axes}, and torch's in that of the parameter"
            )
        for at in group.members:
            like = parameters[at]
            # As torch's own optimizers make them: of the dtype and layout of their parameter. Of a
            # matrix Adafactor estimates the same with rows and columns exchanged.
            entry = {
                slot: arrays[at].to(like.dtype, copy=True)
                if axes is None
                else arrays[at].mT.to(like.dtype, copy=True)
                for slot, arrays in state.slots.items()
                if at in arrays
            }
            if axes is not None:
                entry = {_EXCHANGED[slot]: array for slot, array in entry.items()}
            if not entry:
                continue
            if state.algorithm not in _UNCOUNTED:  # of the default dtype, as torch has it
                entry["step"] = torch.tensor(float(group.step))
            entry |= {name: torch.tensor(value) for name, value in group.numbers.items()}
            optimizer.state[like] = entry
    return optimizer, schedulers.write(optimizer, [schedules for _, schedules, _ in merged])
