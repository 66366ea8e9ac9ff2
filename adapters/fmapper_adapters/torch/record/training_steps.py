"""Results, gradients and a few steps of descent, which a translation must match."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmapper import fleaves, to_torch

_STEPS = 5


def training_steps(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
) -> Callable[[float, float], dict[str, Any]]:
    """Returns a function of a rate and a disturbance that runs and trains a copy.

    Dropout is left out. The module stays as it is.
    """
    model = copy.deepcopy(model)
    model.train(train)
    for inner in model.modules():
        if _is_noise(inner):
            inner.eval()
    args, inputs = to_torch((tuple(args), dict(kwargs)), strict=False)

    def run(rate: float, off: float) -> dict[str, Any]:
        with _WithoutDropout():
            return _run(copy.deepcopy(model), args, inputs, rate, off)

    return run


def _is_noise(module: torch.nn.Module) -> bool:
    """Returns whether a module's modes differ only in noise."""
    held = (module.parameters(), module.buffers(), module.children())
    return not any(next(iter(one), None) is not None for one in held)


def _run(model: torch.nn.Module, args: Any, inputs: Any, rate: float, off: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in learned.values() if off else ():
            waves = torch.cos(torch.arange(parameter.numel(), dtype=torch.float64))
            parameter.mul_(1 + off * waves.reshape(parameter.shape))
        for i, output in enumerate(_outputs(copy.deepcopy(model), args, inputs)):
            found[f"output.{i}"] = output.numpy()
    for step in range(_STEPS if learned else 0):
        loss = _loss(_outputs(model, args, inputs))
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return found
        gradients = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)
        with torch.no_grad():
            for (name, parameter), gradient in zip(learned.items(), gradients, strict=True):
                if gradient is None:
                    continue
                if step == 0:
                    found[f"gradient.{name}"] = gradient.detach().clone().numpy()
                parameter.sub_(rate * gradient)
    for name, parameter in learned.items():
        if f"gradient.{name}" in found:
            found[f"after.{name}"] = parameter.detach().numpy()
    return found


class _WithoutDropout(TorchFunctionMode):
    """Leaves dropout out, also that inside of attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is torch.nn.functional.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
        return func(*args, **kwargs)


_DROPOUT = {
    torch.dropout,
    torch.nn.functional.dropout,
    torch.nn.functional.dropout1d,
    torch.nn.functional.dropout2d,
    torch.nn.functional.dropout3d,
    torch.nn.functional.feature_alpha_dropout,
    torch.nn.functional.alpha_dropout,
}


def _outputs(model: torch.nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
    leaves = fleaves(model(*args, **kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _loss(outputs: list[torch.Tensor]) -> Any:
    return sum(
        (x * torch.cos(torch.arange(x.numel(), dtype=torch.float32)).reshape(x.shape)).mean()
        for x in outputs
        if x.is_floating_point()
    )
