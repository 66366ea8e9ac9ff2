"""Averages of the weights: `torch.optim.swa_utils.AveragedModel`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import swa_utils as typed_utils

from fmapper import ConversionError
from fmapper.training import Group, OptimizerState

swa_utils: Any = typed_utils  # its functions have no types

_KINDS = {
    "get_ema_multi_avg_fn": "ema",
    "get_ema_avg_fn": "ema",
    "get_swa_multi_avg_fn": "equal",
    "get_swa_avg_fn": "equal",
    "unbias": "unbiased",
}


def read(model: torch.nn.Module, averaged: typed_utils.AveragedModel) -> OptimizerState:
    """Returns an average of the weights as plain data; see `Optimizers.read_optimizer`."""
    function = averaged.multi_avg_fn or averaged.avg_fn or swa_utils.get_swa_avg_fn()
    kind = _KINDS.get(getattr(function, "__qualname__", "").partition(".")[0])
    if kind is None:
        raise ConversionError(
            "AveragedModel cannot be converted: its function is not one of torch.optim.swa_utils"
        )
    if averaged.use_buffers and [*model.buffers()]:
        raise ConversionError("AveragedModel with use_buffers=True has averages of buffers, too")
    parameters = [*averaged.module.parameters()]
    if [p.shape for p in parameters] != [p.shape for p in model.parameters()]:
        raise ConversionError("AveragedModel: is one of another model")
    decay = inspect.getclosurevars(inspect.unwrap(function)).nonlocals.get("decay")
    group = Group(
        tuple(range(len(parameters))), {"kind": kind, "decay": decay}, int(averaged.n_averaged)
    )
    arrays = {at: parameter.detach() for at, parameter in enumerate(parameters)}
    return OptimizerState("average", (group,), {"average": arrays})


def write(model: torch.nn.Module, state: OptimizerState) -> typed_utils.AveragedModel:
    """Returns an average of the weights; see `Optimizers.write_optimizer`."""
    (group,) = state.groups
    kind, decay = group.settings["kind"], group.settings["decay"]
    how: dict[str, Any] = {}
    if kind != "equal":
        ema = {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(decay)}
        how = {"avg_fn": unbias(decay)} if kind == "unbiased" else ema
    averaged: typed_utils.AveragedModel = swa_utils.AveragedModel(model, **how)
    averaged.n_averaged.fill_(group.step)
    with torch.no_grad():
        for at, parameter in enumerate(averaged.module.parameters()):
            parameter.copy_(state.slots["average"][at])
    return averaged


def unbias(decay: float) -> Callable[[Any, Any, Any], Any]:
    """Returns the function of an average as `optax.ema` with `debias=True` has it."""

    def average(averaged: Any, current: Any, count: Any) -> Any:
        return averaged + (current - averaged) * ((1 - decay) / (1 - decay ** (count + 1)))

    return average
