"""Schedulers of `torch.optim.lr_scheduler`."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils

from fmapper import ConversionError
from fmapper.training import SCHEDULES, Schedule

_LONGEST = 10_000_000  # steps of a table
_RATES = ("initial_lr", "max_lr", "min_lr")  # keys of a group that OneCycleLR goes between
_MOMENTA = ("max_momentum", "base_momentum")
# Those that are made of the settings of their `Schedule`, and have them.
_NATIVE = {name for name in SCHEDULES if hasattr(lr_scheduler, name)} - {
    "OneCycleLR", "SequentialLR", "LambdaLR",
}  # fmt: skip
_Form = tuple[str, dict[str, Any]]  # of a `Schedule`


def read(scheduler: Any, updates: int | None, every: int | None) -> list[dict[str, Schedule]]:
    """Returns what a scheduler does to each group, by setting, in counts of updates.

    Args:
        scheduler: The scheduler.
        updates: How many updates there were; None where the optimizer does not count them.
        every: How many updates there are between two of its steps; None where counts are to tell.

    Raises:
        ConversionError: It depends on more than the step, or how often it is called is not clear.
    """
    groups = range(len(scheduler.optimizer.param_groups))
    forms = [_forms(scheduler, at) for at in groups]
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
        {setting: Schedule(*form, seen, every) for setting, form in each.items()} for each in forms
    ]


def _forms(scheduler: Any, number: int) -> dict[str, _Form]:
    """Returns the form of each setting of a group that a scheduler changes."""
    if type(scheduler) is not lr_scheduler.OneCycleLR:
        return {"lr": _form(scheduler, number)}
    forms = {"lr": _one_cycle(scheduler, number, "lr", _RATES)}
    if scheduler.cycle_momentum:
        forms["momentum"] = _one_cycle(scheduler, number, "momentum", _MOMENTA)
    return forms


def _form(scheduler: Any, number: int) -> _Form:
    """Returns the form of the rate of a group."""
    cls, name = type(scheduler), type(scheduler).__name__
    groups = len(scheduler.optimizer.param_groups)
    if len(getattr(scheduler, "base_lrs", range(groups))) != groups:
        raise ConversionError(
            f"{name}: group {groups - 1} was added to the optimizer after its scheduler was made, "
            "which does not set the rate of that. Make a new scheduler."
        )
    if cls is lr_scheduler.SequentialLR:
        held = vars(scheduler)  # which has no public names for them
        parts = tuple(Schedule(*_form(part, number)) for part in held["_schedulers"])
        return name, {"schedules": parts, "milestones": tuple(held["_milestones"])}
    if cls is lr_scheduler.OneCycleLR and not scheduler.cycle_momentum:
        return _one_cycle(scheduler, number, "lr", _RATES)
    if cls is lr_scheduler.LambdaLR:
        return _by_function(scheduler.lr_lambdas[number])
    if cls is swa_utils.SWALR:
        return _to_average(scheduler, number)
    if name in _NATIVE and cls is getattr(lr_scheduler, name):
        parameters = inspect.signature(SCHEDULES[name]).parameters.values()
        fields = [field.name for field in parameters if field.kind is field.KEYWORD_ONLY]
        return name, {field: _plain(getattr(scheduler, field)) for field in fields}
    raise ConversionError(
        f"{name} cannot be converted: its rate is not a function of the step alone, or it is not a "
        "class of torch.optim.lr_scheduler. Convert without the scheduler."
    )


def _plain(value: Any) -> Any:
    return tuple(sorted(value.elements())) if isinstance(value, Counter) else value


def _one_cycle(scheduler: Any, number: int, what: str, ends: Sequence[str]) -> _Form:
    """Reads what a `OneCycleLR` does to the rate or momentum, in parts of its first value."""
    group, held = scheduler.optimizer.param_groups[number], scheduler.state_dict()
    phases = held["_schedule_phases"]
    return "OneCycleLR", {
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
    return "SWALR", {
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
        return "LambdaLR", {"function": function}
    return "table", {"values": tuple(float(function(at)) for at in range(int(total) + 1))}


def write(optimizer: torch.optim.Optimizer, schedules: Sequence[Mapping[str, Schedule]]) -> Any:
    """Returns a scheduler that continues the schedules of the groups; None if there are none.

    Where torch has none that can begin in the middle it is a `LambdaLR` of rates, not factors.

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
    bases = [float(group["lr"]) for group in optimizer.param_groups]
    values = [_value(schedule, base) for schedule, base in zip(rates, bases, strict=True)]
    first, kinds = rates[0], {schedule and schedule.kind for schedule in rates}
    held: dict[str, Any] = {}
    if any("momentum" in each for each in schedules):
        scheduler, held = _cycle_momentum(optimizer, schedules, bases, position)
    elif kinds == {"LambdaLR"}:
        scheduler = lr_scheduler.LambdaLR(optimizer, [x.settings["function"] for x in moving])
    elif first is not None and first.kind in _NATIVE and all(x == first for x in rates):
        scheduler = getattr(lr_scheduler, first.kind)(optimizer, **first.settings)
        if first.kind == "CosineAnnealingWarmRestarts":
            held = _cycle(position, **first.settings)
    else:
        scheduler, bases = lr_scheduler.LambdaLR(optimizer, [*values]), [1.0] * len(bases)
    for group, base, value in zip(optimizer.param_groups, bases, values, strict=True):
        group["initial_lr"], group["lr"] = base, value(position)
    held |= {
        "last_epoch": position,
        "base_lrs": bases,
        "_step_count": position + 1,
        "_last_lr": [group["lr"] for group in optimizer.param_groups],
    }
    scheduler.load_state_dict({**scheduler.state_dict(), **held})
    return scheduler


def _cycle(position: int, *, T_0: int, T_mult: int, **_: Any) -> dict[str, int]:
    """Returns the length of the cycle that a position is in, and how much of it is over."""
    length, over = T_0, position
    while over >= length:
        over -= length
        length *= T_mult
    return {"T_i": length, "T_cur": over}


def _cycle_momentum(
    optimizer: torch.optim.Optimizer,
    schedules: Sequence[Mapping[str, Schedule]],
    bases: Sequence[float],
    position: int,
) -> tuple[Any, dict[str, Any]]:
    """Returns a `OneCycleLR` and its phases, and gives the groups their ends and momentum."""
    rate, momentum = (schedules[0][name].settings for name in ("lr", "momentum"))
    momenta = [x["betas"][0] if "betas" in x else x["momentum"] for x in optimizer.param_groups]
    # Whose constructor puts momenta of its own into the groups.
    scheduler = lr_scheduler.OneCycleLR(optimizer, [*bases], int(rate["phases"][-1][0]) + 1)
    for group, base, first, each in zip(
        optimizer.param_groups, bases, momenta, schedules, strict=True
    ):
        cycle = each["momentum"]
        group.update({end: base * x for end, x in each["lr"].settings["factors"].items()})
        group.update({end: first * x for end, x in cycle.settings["factors"].items()})
        now = _value(cycle, first)(position)
        group.update({"betas": (now, group["betas"][1])} if "betas" in group else {"momentum": now})
    phases = [
        {"end_step": end, "start_lr": a, "end_lr": b, "start_momentum": c, "end_momentum": d}
        for (end, a, b), (_, c, d) in zip(rate["phases"], momentum["phases"], strict=True)
    ]
    strategy = "linear" if rate["linear"] else "cos"
    return scheduler, {"_schedule_phases": phases, "_anneal_func_type": strategy}


def _value(schedule: Schedule | None, base: float) -> Callable[[int], float]:
    return lambda step: base if schedule is None else float(schedule.rate(base, step))
