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
_Groups = Sequence[Mapping[str, Schedule]]


def read(scheduler: Any, updates: int | None, every: int | None) -> list[dict[str, Schedule]]:
    """Returns what a scheduler does to each group, by setting, in counts of updates.

    There were so many `updates` as far as the optimizer counts them, and `every` are between two
    steps of the scheduler; None where counts are to tell.
    """
    groups = [_forms(scheduler, at) for at in range(len(scheduler.optimizer.param_groups))]
    name, position = type(scheduler).__name__, scheduler.last_epoch
    if every is None and (not updates or position != updates):
        problem = (
            f"it was called {position} times in {updates} updates of the parameters, so it counts "
            "something else, such as epochs"
            if updates
            else "the optimizer has no count of updates"
        )
        raise ConversionError(
            f"{name}: {problem}. JAX computes the rate from the count of updates: pass "
            "scheduler_every=1 if step() of the scheduler is called after each update, or the "
            "number of updates between two calls."
        )
    every = every or 1
    seen = position * every
    if updates and updates // every == position:  # in the middle of an epoch
        seen = updates
    return [{key: Schedule(*form, seen, every) for key, form in forms.items()} for forms in groups]


def _forms(scheduler: Any, number: int) -> dict[str, _Form]:
    """Returns the form of each setting of a group that a scheduler changes."""
    cls, name = type(scheduler), type(scheduler).__name__
    groups, held = scheduler.optimizer.param_groups, vars(scheduler)  # not all have public names
    if len(getattr(scheduler, "base_lrs", groups)) != len(groups):
        raise ConversionError(
            f"{name}: group {len(groups) - 1} was added to the optimizer after its scheduler was "
            "made, which does not set the rate of that. Make a new scheduler."
        )
    group, forms = groups[number], {}
    if cls is lr_scheduler.OneCycleLR:
        for what, ends in (("lr", _RATES), ("momentum", _MOMENTA))[: 1 + scheduler.cycle_momentum]:
            phases = tuple(
                (float(phase["end_step"]), phase[f"start_{what}"], phase[f"end_{what}"])
                for phase in held["_schedule_phases"]
            )
            factors = {end: group[end] / group[ends[0]] for end in ends}  # of the first value
            is_linear = held["_anneal_func_type"] == "linear"
            forms[what] = name, {"phases": phases, "factors": factors, "linear": is_linear}
        return forms
    if cls is lr_scheduler.SequentialLR:
        parts = [_forms(part, number) for part in held["_schedulers"]]
        if all(len(part) == 1 for part in parts):
            schedules = tuple(Schedule(*part["lr"]) for part in parts)
            settings = {"schedules": schedules, "milestones": tuple(held["_milestones"])}
            return {"lr": (name, settings)}
        name = "OneCycleLR with cycle_momentum=True within SequentialLR"
    if cls is lr_scheduler.LambdaLR:
        function = scheduler.lr_lambdas[number]
        # Those of transformers, such as `get_linear_schedule_with_warmup`, say for how many steps.
        total = getattr(function, "keywords", {}).get("num_training_steps")
        if total is None or total > _LONGEST:
            return {"lr": ("LambdaLR", {"function": function})}
        values = tuple(float(function(at)) for at in range(int(total) + 1))
        return {"lr": ("table", {"values": values})}
    if cls is swa_utils.SWALR:
        # From the rate that there is to that of the average.
        is_linear = held["_anneal_strategy"] == "linear"
        length = max(1, scheduler.anneal_epochs)
        share = min(1.0, scheduler.last_epoch / length)
        share = share if is_linear else (1.0 - math.cos(math.pi * share)) / 2.0
        rate, last, base = (float(group[key]) for key in ("lr", "swa_lr", "initial_lr"))
        first = last if share == 1.0 else (rate - share * last) / (1.0 - share)
        factors = {"initial_lr": first / base, "swa_lr": last / base}
        cycle = float(length), *factors
        return {"lr": (name, {"phases": (cycle,), "factors": factors, "linear": is_linear})}
    if name in _NATIVE and cls is getattr(lr_scheduler, name):
        fields = inspect.getfullargspec(SCHEDULES[name]).kwonlyargs
        settings = {field: held[field] for field in fields}
        if isinstance(steps := settings.get("milestones"), Counter):
            settings["milestones"] = tuple(sorted(steps.elements()))
        return {"lr": (name, settings)}
    raise ConversionError(
        f"{name} cannot be converted: its rate is not a function of the step alone, or it is not a "
        "class of torch.optim.lr_scheduler. Convert without the scheduler."
    )


def write(optimizer: torch.optim.Optimizer, schedules: _Groups) -> Any:
    """Returns a scheduler that continues the schedules of the groups; None if there are none.

    Where torch has none that can begin in the middle it is a `LambdaLR` of rates, not factors.
    """
    rates = [each.get("lr") for each in schedules]
    moving = [schedule for schedule in rates if schedule is not None]
    if not moving:
        return None
    if len({(schedule.position, schedule.every) for schedule in moving}) > 1:
        raise ConversionError("the schedules of the groups have counted different steps")
    first, position = moving[0], moving[0].position // moving[0].every
    bases = [float(group["lr"]) for group in optimizer.param_groups]
    values = [_value(schedule, base) for schedule, base in zip(rates, bases, strict=True)]
    held: dict[str, Any] = {}
    if any("momentum" in each for each in schedules):
        scheduler, held = _cycle_momentum(optimizer, schedules)
    elif {schedule and schedule.kind for schedule in rates} == {"LambdaLR"}:
        scheduler = lr_scheduler.LambdaLR(optimizer, [x.settings["function"] for x in moving])
    elif first.kind in _NATIVE and all(x == first for x in rates):
        scheduler = getattr(lr_scheduler, first.kind)(optimizer, **first.settings)
        if first.kind == "CosineAnnealingWarmRestarts":
            scheduler.step(position)  # which sets the length of the cycle
    else:
        scheduler, bases = lr_scheduler.LambdaLR(optimizer, [*values]), [1.0] * len(bases)
    for group, base, value in zip(optimizer.param_groups, bases, values, strict=True):
        group["initial_lr"], group["lr"] = base, value(position)
    held |= {"last_epoch": position, "base_lrs": bases, "_step_count": position + 1}
    held["_last_lr"] = [group["lr"] for group in optimizer.param_groups]
    scheduler.load_state_dict({**scheduler.state_dict(), **held})
    return scheduler


def _cycle_momentum(optimizer: Any, schedules: _Groups) -> tuple[Any, dict[str, Any]]:
    """Returns a `OneCycleLR` and its phases, and gives the groups their ends and momentum."""
    rate, momentum = (schedules[0][name].settings for name in ("lr", "momentum"))
    groups = optimizer.param_groups  # whose momenta the constructor replaces
    begins = [(x["lr"], x["betas"][0] if "betas" in x else x["momentum"]) for x in groups]
    rates = [float(first) for first, _ in begins]
    scheduler = lr_scheduler.OneCycleLR(optimizer, rates, int(rate["phases"][-1][0]) + 1)
    for group, firsts, each in zip(groups, begins, schedules, strict=True):
        for first, what in zip(firsts, ("lr", "momentum"), strict=True):
            group.update({end: first * x for end, x in each[what].settings["factors"].items()})
        schedule = each["momentum"]
        now = _value(schedule, firsts[1])(schedule.position // schedule.every)
        group.update({"betas": (now, group["betas"][1])} if "betas" in group else {"momentum": now})
    phases = [
        {"end_step": end, "start_lr": a, "end_lr": b, "start_momentum": c, "end_momentum": d}
        for (end, a, b), (_, c, d) in zip(rate["phases"], momentum["phases"], strict=True)
    ]
    strategy = "linear" if rate["linear"] else "cos"
    return scheduler, {"_schedule_phases": phases, "_anneal_func_type": strategy}


def _value(schedule: Schedule | None, base: float) -> Callable[[int], float]:
    return lambda step: base if schedule is None else float(schedule.rate(base, step))
