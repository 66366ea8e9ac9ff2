"""Schedulers of `torch.optim.lr_scheduler`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from fmapper import ConversionError
from fmapper.training import Schedule

_FIELDS: dict[type, tuple[str, tuple[str, ...]]] = {
    lr_scheduler.ConstantLR: ("constant", ("factor", "total_iters")),
    lr_scheduler.LinearLR: ("linear", ("start_factor", "end_factor", "total_iters")),
    lr_scheduler.ExponentialLR: ("exponential", ("gamma",)),
    lr_scheduler.PolynomialLR: ("polynomial", ("total_iters", "power")),
    lr_scheduler.CosineAnnealingLR: ("cosine", ("T_max", "eta_min")),
    lr_scheduler.CosineAnnealingWarmRestarts: ("restarts", ("T_0", "T_mult", "eta_min")),
}
_LONGEST = 10_000_000  # steps of a table


def read(scheduler: Any, steps: int) -> Schedule:
    """Returns a scheduler as plain data, which counts updates of the parameters.

    Args:
        scheduler: The scheduler.
        steps: How many updates there were. Code that calls the scheduler once an epoch has made
            fewer steps of the schedule.

    Raises:
        ConversionError: It depends on more than the step, or is not called after each update.
    """
    name = type(scheduler).__name__
    position = scheduler.last_epoch
    if steps > 1 and position != steps:
        raise ConversionError(
            f"{name}: it was called {position} times in {steps} updates of the parameters, so it "
            "counts something else, such as epochs. A schedule in JAX counts updates: convert "
            "without the scheduler, and set the rate of each epoch there."
        )
    return Schedule(*_form(scheduler), position)


def check(scheduler: Any) -> None:
    """Raises for a scheduler that is not a function of the step."""
    _form(scheduler)


def _form(scheduler: Any) -> tuple[str, dict[str, Any]]:
    cls, name = type(scheduler), type(scheduler).__name__
    if cls in _FIELDS:
        kind, fields = _FIELDS[cls]
        return kind, {field: getattr(scheduler, field) for field in fields}
    if cls is lr_scheduler.StepLR:
        return "step", {"milestones": scheduler.step_size, "gamma": scheduler.gamma}
    if cls is lr_scheduler.MultiStepLR:
        milestones = tuple(sorted(scheduler.milestones.elements()))
        return "step", {"milestones": milestones, "gamma": scheduler.gamma}
    if cls is lr_scheduler.SequentialLR:
        held = vars(scheduler)  # which has no public names for them
        parts = tuple(Schedule(*_form(part)) for part in held["_schedulers"])
        return "sequence", {"schedules": parts, "milestones": tuple(held["_milestones"])}
    if cls is lr_scheduler.OneCycleLR:
        return "onecycle", _one_cycle(scheduler)
    if cls is lr_scheduler.LambdaLR:
        return "table", {"values": _table(scheduler)}
    raise ConversionError(
        f"{name} cannot be converted: its rate is not a function of the step alone, or it is not a "
        "class of torch.optim.lr_scheduler. Convert without the scheduler."
    )


def _one_cycle(scheduler: Any) -> dict[str, Any]:
    if scheduler.cycle_momentum:
        raise ConversionError(
            "OneCycleLR: cycle_momentum=True changes the optimizer's momentum in each step, which "
            "a schedule of the rate cannot. Use cycle_momentum=False."
        )
    group, held = scheduler.optimizer.param_groups[0], scheduler.state_dict()
    rates = {key: group[key] / group["initial_lr"] for key in ("initial_lr", "max_lr", "min_lr")}
    return {
        "phases": tuple(
            (float(phase["end_step"]), rates[phase["start_lr"]], rates[phase["end_lr"]])
            for phase in held["_schedule_phases"]
        ),
        "linear": held["_anneal_func_type"] == "linear",
    }


def _table(scheduler: Any) -> tuple[float, ...]:
    """Returns the factors of a `LambdaLR`, whose function says itself how many steps there are.

    The functions of transformers do: `get_linear_schedule_with_warmup` and its like.
    """
    functions = {_identity(function): function for function in scheduler.lr_lambdas}
    (function, *others) = functions.values()
    keywords = getattr(function, "keywords", {})
    total = keywords.get("num_training_steps")
    if others or total is None or total > _LONGEST:
        raise ConversionError(
            "LambdaLR cannot be converted: its function does not say for how many steps. Use a "
            "schedule of transformers, or another class of torch.optim.lr_scheduler."
        )
    return tuple(float(function(at)) for at in range(int(total) + 1))


def _identity(function: Any) -> Any:
    keywords = getattr(function, "keywords", None)
    return id(function) if keywords is None else (function.func, tuple(sorted(keywords.items())))


def write(optimizer: torch.optim.Optimizer, schedule: Schedule) -> Any:
    """Returns a scheduler that continues a schedule."""
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = _build(optimizer, schedule, rates)
    is_native = type(scheduler) is not lr_scheduler.LambdaLR
    base_rates = [*rates] if is_native else [1.0] * len(rates)
    if schedule.kind == "restarts":
        scheduler.T_i, scheduler.T_cur = _cycle(schedule)
    for group, rate, base in zip(optimizer.param_groups, rates, base_rates, strict=True):
        group["initial_lr"] = base
        group["lr"] = float(schedule.rate(rate, schedule.position))
    held = {
        "last_epoch": schedule.position,
        "base_lrs": base_rates,
        "_step_count": schedule.position + 1,
        "_last_lr": [group["lr"] for group in optimizer.param_groups],
    }
    scheduler.load_state_dict({**scheduler.state_dict(), **held})
    return scheduler


def _cycle(schedule: Schedule) -> tuple[int, int]:
    """Returns the length of the cycle that a position is in, and how much of it is over."""
    length, left = schedule.settings["T_0"], schedule.position
    while left >= length:
        left -= length
        length *= schedule.settings["T_mult"]
    return length, left


def _build(optimizer: torch.optim.Optimizer, schedule: Schedule, rates: Sequence[float]) -> Any:
    """Returns a scheduler of the class for a kind of schedule.

    Where torch has none that can begin in the middle it is a `LambdaLR` of rates, not factors.
    """
    settings: Mapping[str, Any] = schedule.settings
    for cls, (kind, _) in _FIELDS.items():
        if kind == schedule.kind:
            return cls(optimizer, **settings)
    if schedule.kind == "step":
        at, gamma = settings["milestones"], settings["gamma"]
        if isinstance(at, int):
            return lr_scheduler.StepLR(optimizer, at, gamma)
        return lr_scheduler.MultiStepLR(optimizer, at, gamma)
    return lr_scheduler.LambdaLR(optimizer, [_rate(schedule, rate) for rate in rates])


def _rate(schedule: Schedule, base: float) -> Callable[[int], float]:
    return lambda step: float(schedule.rate(base, step))
