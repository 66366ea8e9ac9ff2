"""Optimizers of `torch.optim`, with their state."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import swa_utils as typed_utils
from torch.optim.lr_scheduler import OneCycleLR

from fmapper import ConversionError, ConversionWarning
from fmapper.backends import warn
from fmapper.training import ALGORITHMS, Group, OptimizerState, Schedule
from fmapper_adapters.torch.training import schedulers

swa_utils: Any = typed_utils  # its functions have no types
_CLASSES: dict[str, Any] = {
    cls.__name__.lower(): cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and cls.__name__.lower() in {*ALGORITHMS, "adamw"}
}
_NUMBERS = ("mu_product",)  # state that is a number for each parameter, of NAdam
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
_AVERAGES = {  # by what makes the function of an `AveragedModel`
    "get_ema_multi_avg_fn": "ema", "get_ema_avg_fn": "ema", "get_swa_multi_avg_fn": "equal",
    "get_swa_avg_fn": "equal", "_write_average": "unbiased",
}  # fmt: skip
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
    if isinstance(optimizer, typed_utils.AveragedModel):
        if scheduler is not None:
            raise ConversionError("AveragedModel: has no rate, and so no scheduler")
        return _read_average(model, optimizer)
    name = type(optimizer).__name__
    if type(optimizer) is not _CLASSES.get(name.lower()):
        why = _WHY_NOT.get(name, "its class is not one of torch.optim that both sides have")
        raise ConversionError(
            f"{name} cannot be converted: {why}. Convert the model alone, and begin a new "
            "optimizer in the other framework."
        )
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise ConversionError(f"{type(scheduler).__name__}: is the scheduler of another optimizer")
    algorithm = "adam" if name == "AdamW" else name.lower()
    settings = [_settings(group, scheduler) for group in optimizer.param_groups]
    if name == "AdamW":
        settings = [{"decoupled": True} | each for each in settings]
    places = {id(p): (at, name) for at, (name, p) in enumerate(model.named_parameters())}
    members: dict[Any, list[int]] = defaultdict(list)
    slots: dict[str, dict[int, Any]] = defaultdict(dict)
    has_hooks = any(getattr(optimizer, name, None) for name in _STEP_HOOKS)
    problems = ["it has hooks of its steps, which would be lost"] * has_hooks
    given = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    has_gradients = any(p.grad is not None for p in given)
    steps = max((_step(state) for state in optimizer.state.values()), default=0)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in places:
                raise ConversionError(
                    f"{name}: a parameter of shape {tuple(parameter.shape)} in group {number} is "
                    "not one of the model. Pass the model that the optimizer was made for."
                )
            at, path = places[id(parameter)]
            state = optimizer.state.get(parameter, {})
            step, own = _step(state), settings[number]
            is_stateless = algorithm == "sgd" and not own["momentum"]
            is_left = (
                has_gradients and parameter.grad is None if is_stateless else steps > step == 0
            )
            is_left = is_left and own["weight_decay"] and parameter.requires_grad
            problems += [f"{path}: {x}" for x in _problems(algorithm, parameter, state, is_left)]
            if parameter.requires_grad:  # torch does not update others
                for slot in ALGORITHMS[algorithm].slots:
                    if state.get(slot) is not None:
                        slots[slot][at] = state[slot].detach()
                numbers = tuple((key, float(state[key])) for key in _NUMBERS if key in state)
                members[number, step, numbers].append(at)
    if problems:
        raise ConversionError(f"{name} cannot be converted:\n  " + "\n  ".join(problems))
    schedules: list[dict[str, Schedule]] = [{}] * len(settings)
    if scheduler is not None:
        counted = None if algorithm in _UNCOUNTED else steps
        schedules = schedulers.read(scheduler, counted, every)
        for number, group in enumerate(optimizer.param_groups):
            schedule, rate = schedules[number]["lr"], float(group["lr"])
            expected = schedule.rate(settings[number]["lr"], schedule.position // schedule.every)
            if not math.isclose(rate, expected, rel_tol=1e-6, abs_tol=1e-12):
                raise ConversionError(
                    f"{name}: group {number} has the rate {rate}, and its scheduler gives "
                    f"{expected} after {scheduler.last_epoch} steps: something else has set the "
                    "rate, or the scheduler is not one of this optimizer"
                )
    elif any("initial_lr" in group for group in optimizer.param_groups):
        message = (
            f"{name} has a scheduler, which was not passed: the rate stays as it is now. Pass "
            "scheduler= for it to go on."
        )
        warn(message, ConversionWarning)
    groups = tuple(
        Group(tuple(at), settings[number], step, dict(numbers), schedules[number])
        for (number, step, numbers), at in members.items()
    )
    return OptimizerState(algorithm, groups, dict(slots))


def _step(state: Mapping[str, Any]) -> int:
    # SGD does not count its steps: that there was one matters for its first momentum.
    return int(state.get("step", state.get("momentum_buffer") is not None))


def _problems(
    algorithm: str, parameter: torch.Tensor, state: Mapping[str, Any], is_left: bool
) -> list[str]:
    """Returns what would be lost of a parameter."""
    unknown = state.keys() - {"step", *ALGORITHMS[algorithm].slots, *_NUMBERS}
    hooks = any(getattr(parameter, name, None) for name in _GRADIENT_HOOKS)
    problems = {
        f"unknown state {', '.join(sorted(unknown))}": unknown,
        "is complex, and gradients of complex numbers are others in JAX": parameter.is_complex(),
        "has hooks of its gradient, which would be lost": hooks,
        "is frozen, so that its moments would be lost. Delete them from optimizer.state, or set "
        "requires_grad": state and not parameter.requires_grad,
        "has had no gradient in the steps of the others, so that torch leaves it as it is, and "
        "weight decay changes it where gradients are 0 instead. Leave it out of the optimizer; if "
        "it was frozen until now, make one step in torch first": is_left,
    }
    return [problem for problem, holds in problems.items() if holds]


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
    value = value.item() if isinstance(value, torch.Tensor) else value
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


@torch.no_grad()
def write(model: torch.nn.Module, state: OptimizerState) -> tuple[Any, Any]:
    """Returns an optimizer of torch and a scheduler; see `Optimizers.write_optimizer`."""
    if state.algorithm == "average":
        return _write_average(model, state), None
    parameters = [*model.parameters()]
    merged: list[tuple[dict[str, Any], Mapping[str, Schedule], list[int]]] = []
    for group in state.groups:  # torch counts for each parameter
        settings = {name: value for name, value in group.settings.items() if name != "axes"}
        alike = [each for each in merged if each[:2] == (settings, group.schedules)]
        if not alike:
            merged += (alike := [(settings, group.schedules, [])])
        alike[0][2].extend(group.members)
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
    own = {"lr", _DECOUPLED, *ALGORITHMS[state.algorithm].settings}  # others are the user's
    optimizer = cls(groups, **{name: value for name, value in groups[0].items() if name in own})
    for group in state.groups:
        axes = group.settings.get("axes")
        if axes is not None and (axes, state.algorithm) != ((1, 0), "adafactor"):
            raise ConversionError(
                f"{state.algorithm} takes the axes of parameter {group.members[0]} in the order "
                f"{axes}, and torch's in that of the parameter"
            )
        for at in group.members:
            # As torch's own optimizers make them: of the dtype and layout of their parameter. Of a
            # matrix Adafactor estimates the same with rows and columns exchanged.
            entry = {
                _EXCHANGED[slot] if axes else slot: (x.mT if axes else x).to(
                    parameters[at].dtype, copy=True
                )
                for slot, arrays in state.slots.items()
                if (x := arrays.get(at)) is not None
            }
            if entry and state.algorithm not in _UNCOUNTED:
                entry["step"] = torch.tensor(float(group.step))  # of the default dtype, as there
            if entry:
                numbers = {name: torch.tensor(value) for name, value in group.numbers.items()}
                optimizer.state[parameters[at]] = entry | numbers
    return optimizer, schedulers.write(optimizer, [schedules for _, schedules, _ in merged])


def _read_average(model: torch.nn.Module, averaged: typed_utils.AveragedModel) -> OptimizerState:
    function = averaged.multi_avg_fn or averaged.avg_fn or swa_utils.get_swa_avg_fn()
    kind = _AVERAGES.get(getattr(function, "__qualname__", "").partition(".")[0])
    arrays = {at: p.detach() for at, p in enumerate(averaged.module.parameters())}
    problems = {
        "cannot be converted: its function is not one of torch.optim.swa_utils": kind is None,
        "with use_buffers=True has averages of buffers, too": averaged.use_buffers
        and [*model.buffers()],
        "is one of another model": [x.shape for x in arrays.values()]
        != [p.shape for p in model.parameters()],
    }
    for problem, holds in problems.items():
        if holds:
            raise ConversionError(f"AveragedModel {problem}")
    decay = inspect.getclosurevars(inspect.unwrap(function)).nonlocals.get("decay")
    group = Group(tuple(arrays), {"kind": kind, "decay": decay}, int(averaged.n_averaged))
    return OptimizerState("average", (group,), {"average": arrays})


def _write_average(model: torch.nn.Module, state: OptimizerState) -> typed_utils.AveragedModel:
    (group,) = state.groups
    kind, decay = group.settings["kind"], group.settings["decay"]
    how: dict[str, Any] = {}
    if kind == "ema":
        how["multi_avg_fn"] = swa_utils.get_ema_multi_avg_fn(decay)
    elif kind == "unbiased":  # as `optax.ema` with `debias=True`
        how["avg_fn"] = lambda x, new, n: x + (new - x) * ((1 - decay) / (1 - decay ** (n + 1)))
    averaged: typed_utils.AveragedModel = swa_utils.AveragedModel(model, **how)
    averaged.n_averaged.fill_(group.step)
    for at, parameter in enumerate(averaged.module.parameters()):
        parameter.copy_(state.slots["average"][at])
    return averaged
