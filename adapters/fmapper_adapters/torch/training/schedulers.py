"""Schedulers of `torch.optim.lr_scheduler`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils

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
_RATES = ("initial_lr", "max_lr", "min_lr")  # keys of a group that OneCycleLR goes between
_MOMENTA = ("max_momentum", "base_momentum")


def read(scheduler: Any, updates: int | None, every: int | None) -> list[dict[str, Schedule]]:
    """Returns what a scheduler does to each group, by setting, in counts of updates.

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
    return [
        {setting: Schedule(*form, seen, every) for setting, form in _forms(scheduler, at).items()}
        for at in range(len(scheduler.optimizer.param_groups))
    ]


def check(scheduler: Any) -> None:
    """Raises for a scheduler that is not a function of the step."""
    _forms(scheduler, 0)


_Form = tuple[str, dict[str, Any]]


def _forms(scheduler: Any, number: int) -> dict[str, _Form]:
    """Returns the form of each setting of a group that a scheduler changes."""
    if type(scheduler) is not lr_scheduler.OneCycleLR:
        return {"lr": _form(scheduler, number)}
    forms = {"lr": _one_cycle(scheduler, number, "lr", _RATES)}
    if scheduler.cycle_momentum:
        forms["momentum"] = _one_cycle(scheduler, number, "momentum", _MOMENTA)
    return forms


def _form(scheduler: Any, number: int) -> _Form:
    cls, name = type(scheduler), type(scheduler).__name__
    groups = len(scheduler.optimizer.param_groups)
    if len(getattr(scheduler, "base_lrs", range(groups))) != groups:
        raise ConversionError(
            f"{name}: group {groups - 1} was added to the optimizer after its scheduler was made, "
            "which does not set the rate of that. Make a new scheduler."
        )
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
        parts = tuple(Schedule(*_form(part, number)) for part in held["_schedulers"])
        return "sequence", {"schedules": parts, "milestones": tuple(held["_milestones"])}
    if cls is lr_scheduler.OneCycleLR and not scheduler.cycle_momentum:
        return _one_cycle(scheduler, number, "lr", _RATES)
    if cls is lr_scheduler.LambdaLR:
        return _by_function(scheduler.lr_lambdas[number])
    if cls is swa_utils.SWALR:
        return _to_average(scheduler, number)
    raise ConversionError(
        f"{name} cannot be converted: its rate is not a function of the step alone, or it is not a "
        "class of torch.optim.lr_scheduler. Convert without the scheduler."
    )


def _one_cycle(scheduler: Any, number: int, what: str, ends: Sequence[str]) -> _Form:
    """Reads what a `OneCycleLR` does to the rate or momentum, in parts of its first value."""
    group, held = scheduler.optimizer.param_groups[number], scheduler.state_dict()
    phases = held["_schedule_phases"]
    return "onecycle", {
        "phases": tuple(
            (float(phase["end_step"]), phase[f"start_{what}"], phase[f"end_{what}"])
            for phase in phases
        ),
        "factors": {end: group[end] / group[ends[0]] for end in ends},
        "linear": held["_anneal_func_type"] == "linear",
    }


def _to_average(scheduler: Any, number: int) -> _Form:
    """Reads a `SWALR`, which takes the rate that there is to that of the average."""
    group, held = scheduler.optimizer.param_groups[number], scheduler.state_dict()
    linear = held["_anneal_strategy"] == "linear"
    length = max(1, scheduler.anneal_epochs)
    share = min(1.0, scheduler.last_epoch / length)
    share = share if linear else (1.0 - math.cos(math.pi * share)) / 2.0
    rate, last = float(group["lr"]), float(group["swa_lr"])
    first = last if share == 1.0 else (rate - share * last) / (1.0 - share)
    base = group["initial_lr"]
    return "onecycle", {
        "phases": ((float(length), "initial_lr", "swa_lr"),),
        "factors": {"initial_lr": first / base, "swa_lr": last / base},
        "linear": linear,
    }


def _by_function(function: Any) -> _Form:
    """Reads a function of a `LambdaLR`: a table of factors where it says for how many steps.

    The functions of transformers do: `get_linear_schedule_with_warmup` and its like.
    """
    total = getattr(function, "keywords", {}).get("num_training_steps")
    if total is None or total > _LONGEST:
        return "factor", {"function": function}
    return "table", {"values": tuple(float(function(at)) for at in range(int(total) + 1))}


def write(optimizer: torch.optim.Optimizer, schedules: Sequence[Mapping[str, Schedule]]) -> Any:
    """Returns a scheduler that continues the schedules of the groups; None if there are none.

    Raises:
        ConversionError: They are at different positions, of which a scheduler has one.
    """
    rates = [each.get("lr") for each in schedules]
    moving = [schedule for schedule in rates if schedule is not None]
    if not moving:
        return None
    if len({(schedule.position, schedule.every) for schedule in moving}) > 1:
        raise ConversionError("the schedules of the groups have counted different steps")
    position = moving[0].position // moving[0].every
    bases = [group["lr"] for group in optimizer.param_groups]
    values = [_value(schedule, base) for schedule, base in zip(rates, bases, strict=True)]
    scheduler = _build(optimizer, schedules, bases, values)
    is_of_rates = type(scheduler) is lr_scheduler.LambdaLR and any(
        schedule is None or schedule.kind != "factor" for schedule in rates
    )
    bases = [1.0] * len(bases) if is_of_rates else bases
    if moving[0].kind == "restarts" and not is_of_rates:
        scheduler.T_i, scheduler.T_cur = _cycle(moving[0], position)
    for group, base, value in zip(optimizer.param_groups, bases, values, strict=True):
        group["initial_lr"], group["lr"] = base, value(position)
    held = {
        "last_epoch": position,
        "base_lrs": bases,
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


def _build(
    optimizer: torch.optim.Optimizer,
    schedules: Sequence[Mapping[str, Schedule]],
    bases: Sequence[float],
    values: Sequence[Callable[[int], float]],
) -> Any:
    """Returns a scheduler of the class for the schedules of the groups.

    Where torch has none that can begin in the middle it is a `LambdaLR` of rates, not factors.
    """
    if any("momentum" in each for each in schedules):
        return _cycle_momentum(optimizer, schedules, bases)
    first = schedules[0].get("lr")
    if first is not None and all(each == schedules[0] for each in schedules):
        for cls, (kind, _) in _FIELDS.items():
            if kind == first.kind:
                return cls(optimizer, **first.settings)
        if first.kind == "step":
            at, gamma = first.settings["milestones"], first.settings["gamma"]
            if isinstance(at, int):
                return lr_scheduler.StepLR(optimizer, at, gamma)
            return lr_scheduler.MultiStepLR(optimizer, at, gamma)
    if all("lr" in each and each["lr"].kind == "factor" for each in schedules):
        functions = [each["lr"].settings["function"] for each in schedules]
        return lr_scheduler.LambdaLR(optimizer, functions)
    return lr_scheduler.LambdaLR(optimizer, [*values])


def _cycle_momentum(
    optimizer: torch.optim.Optimizer,
    schedules: Sequence[Mapping[str, Schedule]],
    bases: Sequence[float],
) -> Any:
    """Returns a `OneCycleLR` with the phases of the groups, and gives them its momentum."""
    momenta = [
        group["betas"][0] if "betas" in group else group["momentum"]
        for group in optimizer.param_groups
    ]
    how = schedules[0]["lr"].settings
    scheduler = lr_scheduler.OneCycleLR(optimizer, [*bases], int(how["phases"][-1][0]) + 1)
    phases = [
        {"end_step": end, "start_lr": a, "end_lr": b, "start_momentum": c, "end_momentum": d}
        for (end, a, b), (_, c, d) in zip(
            how["phases"], schedules[0]["momentum"].settings["phases"], strict=True
        )
    ]
    for group, base, momentum, each in zip(
        optimizer.param_groups, bases, momenta, schedules, strict=True
    ):
        cycle = each["momentum"]
        group.update({end: base * x for end, x in each["lr"].settings["factors"].items()})
        group.update({end: momentum * x for end, x in cycle.settings["factors"].items()})
        now = _value(cycle, momentum)(cycle.position // cycle.every)
        group.update({"betas": (now, group["betas"][1])} if "betas" in group else {"momentum": now})
    strategy = "linear" if how["linear"] else "cos"
    held = {"_schedule_phases": phases, "_anneal_func_type": strategy}
    scheduler.load_state_dict({**scheduler.state_dict(), **held})
    return scheduler


def _value(schedule: Schedule | None, base: float) -> Callable[[int], float]:
    return lambda step: base if schedule is None else float(schedule.rate(base, step))
