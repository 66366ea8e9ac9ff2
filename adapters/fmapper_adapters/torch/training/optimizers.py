"""Optimizers of `torch.optim`, with their state."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fmapper import ConversionError
from fmapper.training import SETTINGS, Group, OptimizerState, Schedule
from fmapper_adapters.torch.training import averages, schedulers


class _Kind(NamedTuple):
    """An optimizer class: its algorithm, settings and slots.

    Attributes:
        cls: The class.
        algorithm: A key of `fmapper.training.SETTINGS`.
        fixed: Settings that the class does not have, with the values that they have in it.
        slots: Its state of the shape of a parameter.
        numbers: Its state that is a number for each parameter.
        unnamed: Settings of the class that the algorithm does not have; their only value.
    """

    cls: type[torch.optim.Optimizer]
    algorithm: str
    slots: tuple[str, ...]
    fixed: Mapping[str, Any] = {}
    numbers: tuple[str, ...] = ()
    unnamed: Mapping[str, Any] = {}


_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_DECOUPLED = "decoupled_weight_decay"
_KINDS = (
    _Kind(torch.optim.SGD, "sgd", ("momentum_buffer",)),
    _Kind(torch.optim.AdamW, "adam", _ADAM, {"decoupled": True}),
    _Kind(torch.optim.Adam, "adam", _ADAM),
    _Kind(torch.optim.Adamax, "adamax", ("exp_avg", "exp_inf")),
    _Kind(torch.optim.NAdam, "nadam", ("exp_avg", "exp_avg_sq"), {}, ("mu_product",)),
    _Kind(torch.optim.RAdam, "radam", ("exp_avg", "exp_avg_sq")),
    _Kind(torch.optim.RMSprop, "rmsprop", ("square_avg", "grad_avg", "momentum_buffer")),
    _Kind(torch.optim.Adagrad, "adagrad", ("sum",), unnamed={"initial_accumulator_value": None}),
    _Kind(torch.optim.Adadelta, "adadelta", ("square_avg", "acc_delta")),
    _Kind(torch.optim.Adafactor, "adafactor", ("row_var", "col_var", "variance")),
    _Kind(torch.optim.Muon, "muon", ("momentum_buffer",), {"maximize": False}),
)
# Settings that say how it is computed, not what; and what schedulers keep in groups.
_HOW = {
    "params", "foreach", "fused", "capturable", "differentiable", "initial_lr", "param_names",
    "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr",
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


def with_trainable(model: torch.nn.Module, arrays: Sequence[Any]) -> Any:
    """Returns a copy of a module with other values in its parameters."""
    memo = {
        id(old): torch.nn.Parameter(new, requires_grad=old.requires_grad)
        for old, new in zip(model.parameters(), arrays, strict=True)
    }
    return copy.deepcopy(model, memo)


def read(
    model: torch.nn.Module, optimizer: Any, scheduler: Any, every: int | None
) -> OptimizerState:
    """Returns an optimizer as plain data; see `Optimizers.read_optimizer`."""
    if isinstance(optimizer, torch.optim.swa_utils.AveragedModel):
        if scheduler is not None:
            raise ConversionError("AveragedModel: has no rate, and so no scheduler")
        return averages.read(model, optimizer)
    name = type(optimizer).__name__
    kind = next((kind for kind in _KINDS if type(optimizer) is kind.cls), None)
    if kind is None:
        why = _WHY_NOT.get(name, "its class is not one of torch.optim that both sides have")
        raise ConversionError(
            f"{name} cannot be converted: {why}. Convert the model alone, and begin a new "
            "optimizer in the other framework."
        )
    if scheduler is not None:
        schedulers.check(scheduler)
        if scheduler.optimizer is not optimizer:
            raise ConversionError(
                f"{type(scheduler).__name__}: is the scheduler of another optimizer"
            )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {id(parameter): at for at, parameter in enumerate(model.parameters())}
    found: dict[Any, list[int]] = defaultdict(list)
    settings: dict[int, dict[str, Any]] = {}
    slots: dict[str, dict[int, Any]] = defaultdict(dict)
    problems = _hooks(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        settings[number] = _settings(kind, group, scheduler)
        for parameter in group["params"]:
            at = places.get(id(parameter))
            if at is None:
                raise ConversionError(
                    f"{name}: a parameter of shape {tuple(parameter.shape)} in group {number} is "
                    "not one of the model. Pass the model that the optimizer was made for."
                )
            state = optimizer.state.get(parameter, {})
            problem = _problem(kind, parameter, state)
            if problem is not None:
                problems.append(f"{names[id(parameter)]}: {problem}")
            if problem is not None or not parameter.requires_grad:  # torch does not update it
                continue
            for slot in kind.slots:
                if state.get(slot) is not None:
                    slots[slot][at] = state[slot].detach()
            numbers = tuple(float(state[key]) for key in kind.numbers if key in state)
            # SGD does not count its steps: that there was one matters for its first momentum.
            step = int(state.get("step", state.get("momentum_buffer") is not None))
            found[number, step, numbers].append(at)
    steps = max((step for _, step, _ in found), default=0)
    schedules: list[dict[str, Schedule]] = [{}] * len(settings)
    if scheduler is not None:
        counted = None if kind.algorithm in _UNCOUNTED else steps
        schedules = schedulers.read(scheduler, counted, every)
        _check_rates(optimizer, settings, schedules)
    groups = tuple(
        Group(
            tuple(at), settings[number], step, dict(zip(kind.numbers, numbers, strict=False)),
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
        for at in group.members
        if group.settings["weight_decay"]
        and (
            steps > group.step == 0
            or (_is_stateless(kind, group) and has_gradients and parameters[at].grad is None)
        )
    ]
    if problems:
        raise ConversionError(f"{name} cannot be converted:\n  " + "\n  ".join(problems))
    notes: tuple[str, ...] = ()
    if scheduler is None and any("initial_lr" in group for group in optimizer.param_groups):
        notes = (
            f"{name} has a scheduler, which was not passed: the rate stays as it is now. Pass "
            "scheduler= for it to go on.",
        )
    return OptimizerState(kind.algorithm, groups, dict(slots), warnings=notes)


def _hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    has_hooks = any(getattr(optimizer, name, None) for name in _STEP_HOOKS)
    return ["it has hooks of its steps, which would be lost"] * has_hooks


def _problem(kind: _Kind, parameter: torch.Tensor, state: Mapping[str, Any]) -> str | None:
    """Returns what would be lost of a parameter."""
    unknown = state.keys() - {"step", *kind.slots, *kind.numbers}
    dtypes = {state[slot].dtype for slot in kind.slots if state.get(slot) is not None}
    hooks = any(getattr(parameter, name, None) for name in _GRADIENT_HOOKS)
    if unknown:
        return f"unknown state {', '.join(sorted(unknown))}"
    if parameter.is_complex():
        return "is complex, and gradients of complex numbers are others in JAX"
    if dtypes - {parameter.dtype}:
        return f"its moments are of {dtypes.pop()}, and it is of {parameter.dtype}"
    if hooks:
        return "has hooks of its gradient, which would be lost"
    if not parameter.requires_grad and state:
        return (
            "is frozen, so that its moments would be lost. Delete them from optimizer.state, or "
            "set requires_grad"
        )
    return None


def _is_stateless(kind: _Kind, group: Group) -> bool:
    return kind.algorithm == "sgd" and not group.settings["momentum"]


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


def _settings(kind: _Kind, group: Mapping[str, Any], scheduler: Any) -> dict[str, Any]:
    """Returns the settings of a group, with the rate and momentum that a schedule begins with."""
    values = {"lr": float(group["lr"]), **kind.fixed}
    if scheduler is not None:
        values["lr"] = float(group["initial_lr"])
    if scheduler is not None and getattr(scheduler, "cycle_momentum", False):
        first = float(group["max_momentum"])
        cycled = (
            {"betas": (first, *group["betas"][1:])} if "betas" in group else {"momentum": first}
        )
        group = {**group, **cycled}
    for key, value in group.items():
        name = "decoupled" if key == _DECOUPLED else key
        if key in _HOW or key == "lr" or name in kind.fixed or key in kind.unnamed:
            continue
        values[name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def write(model: torch.nn.Module, state: OptimizerState) -> tuple[Any, Any]:
    """Returns an optimizer of torch and a scheduler; see `Optimizers.write_optimizer`."""
    if state.algorithm == "average":
        return averages.write(model, state), None
    kind = _kind_for(state)
    parameters = [*model.parameters()]
    groups: list[dict[str, Any]] = []
    steps: dict[int, Group] = {}
    for group in state.groups:
        steps |= dict.fromkeys(group.members, group)
    merged: list[tuple[Group, list[int]]] = []  # torch counts for each parameter
    for group in state.groups:
        like = (
            members
            for other, members in merged
            if (other.settings, other.schedules) == (group.settings, group.schedules)
        )
        members = next(like, None)
        if members is None:
            merged.append((group, members := []))
        members += group.members
    for group, members in merged:
        given = dict(group.settings)
        for name in kind.fixed:
            given.pop(name, None)
        if "decoupled" in given:
            given[_DECOUPLED] = given.pop("decoupled")
        groups.append({"params": [parameters[at] for at in sorted(members)], **given})
    if not groups:
        raise ConversionError("no parameter is updated, and torch has no optimizer of nothing")
    known = {"lr", _DECOUPLED, *SETTINGS[kind.algorithm]}  # beside which users name their groups
    defaults = {name: value for name, value in groups[0].items() if name in known}
    optimizer = kind.cls(groups, **defaults)
    for at, group in steps.items():
        held = {slot: arrays[at] for slot, arrays in state.slots.items() if at in arrays}
        axes = tuple(state.axes.get(at, ()))
        if axes == (1, 0) and kind.algorithm == "adafactor":
            # Of a matrix its estimate is the same with rows and columns exchanged.
            held = {new: held[old].mT for new, old in _EXCHANGED.items() if old in held}
        elif axes != tuple(range(len(axes))):
            raise ConversionError(
                f"{kind.algorithm} takes the axes of parameter {at} in the order {state.axes[at]}, "
                "and torch's in that of the parameter"
            )
        if not held:
            continue
        # As torch's own optimizers make them: of the dtype and layout of their parameter.
        entry: dict[str, Any] = {
            slot: array.to(parameters[at].dtype, copy=True) for slot, array in held.items()
        }
        if kind.algorithm not in _UNCOUNTED:
            entry["step"] = torch.tensor(float(group.step))  # of the default dtype, as torch has it
        entry |= {name: torch.tensor(value) for name, value in group.numbers.items()}
        optimizer.state[parameters[at]] = entry
    return optimizer, schedulers.write(optimizer, [group.schedules for group, _ in merged])


def _kind_for(state: OptimizerState) -> _Kind:
    """Returns the class for an algorithm: AdamW where all decay is decoupled."""
    decoupled = {
        bool(group.settings["decoupled"])
        for group in state.groups
        if "decoupled" in group.settings and group.settings["weight_decay"]
    }
    return next(
        kind
        for kind in _KINDS
        if kind.algorithm == state.algorithm
        and ("decoupled" not in kind.fixed or decoupled == {True})
    )
