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


def read(scheduler: Any, updates: int | None, every: int | None) -> Schedule:
    """Returns a scheduler as plain data, which counts updates of the parameters.

    Args:
        scheduler: The scheduler.
        updates: How many updates there were; None where the optimizer does not count them.
        every: How many updates there are between two of its steps; None where counts are to tell.

    Raises:
        ConversionError: It depends on more than the step, or how often it is called is not clear.
    """
    name, position = type(scheduler).__name__, scheduler.last_epoch
    say = (
        "JAX computes the rate from the count of updates: pass scheduler_every=1 if step() of the "
        "scheduler is called after each update, or the number of updates between two calls"
    )
    if every is None:
        if not updates:
            raise ConversionError(f"{name}: the optimizer has no count of updates. {say}.")
        if position != updates:
            raise ConversionError(
                f"{name}: it was called {position} times in {updates} updates of the parameters, "
                f"so it counts something else, such as epochs. {say}."
            )
        every = 1
    seen = position * every
    if updates and updates // every == position:  # in the middle of an epoch
        seen = updates
    return Schedule(*_form(scheduler), seen, every)


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
        return _by_function(scheduler)
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


def _by_function(scheduler: Any) -> tuple[str, dict[str, Any]]:
    """Reads a `LambdaLR`: a table of factors where its function says for how many steps.

    The functions of transformers do: `get_linear_schedule_with_warmup` and its like.
    """
    functions = {_identity(function): function for function in scheduler.lr_lambdas}
    (function, *others) = functions.values()
    if others:
        raise ConversionError(
            "LambdaLR cannot be converted: it has several functions, and a schedule in JAX one for "
            "all groups"
        )
    total = getattr(function, "keywords", {}).get("num_training_steps")
    if total is None or total > _LONGEST:
        return "factor", {"function": function}
    return "table", {"values": tuple(float(function(at)) for at in range(int(total) + 1))}


def _identity(function: Any) -> Any:
    keywords = getattr(function, "keywords", None)
    return id(function) if keywords is None else (function.func, tuple(sorted(keywords.items())))


def write(optimizer: torch.optim.Optimizer, schedule: Schedule) -> Any:
    """Returns a scheduler that continues a schedule."""
    rates = [group["lr"] for group in optimizer.param_groups]
    position = schedule.position // schedule.every
    scheduler = _build(optimizer, schedule, rates)
    is_of_rates = type(scheduler) is lr_scheduler.LambdaLR and schedule.kind != "factor"
    base_rates = [1.0] * len(rates) if is_of_rates else [*rates]
    if schedule.kind == "restarts":
        scheduler.T_i, scheduler.T_cur = _cycle(schedule, position)
    for group, rate, base in zip(optimizer.param_groups, rates, base_rates, strict=True):
        group["initial_lr"] = base
        group["lr"] = float(schedule.rate(rate, position))
    held = {
        "last_epoch": position,
        "base_lrs": base_rates,
        "_step_count": position + 1,
        "_last_lr": [group["lr"] for group in optimizer.param_groups],
    }
    scheduler.load_state_dict({**scheduler.state_dict(), **held})
    return scheduler


def _cycle(schedule: Schedule, position: int) -> tuple[int, int]:
    """Returns the length of the cycle that a position is in, and how much of it is over."""
    length, left = schedule.settings["T_0"], position
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
    if schedule.kind == "factor":
        return lr_scheduler.LambdaLR(optimizer, settings["function"])
    return lr_scheduler.LambdaLR(optimizer, [_rate(schedule, rate) for rate in rates])


def _rate(schedule: Schedule, base: float) -> Callable[[int], float]:
    return lambda step: float(schedule.rate(base, step))
