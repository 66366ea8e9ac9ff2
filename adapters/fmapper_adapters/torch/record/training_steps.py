"""What a module gives, its gradients, and a few steps of descent: what a translation must match."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmapper import fleaves, to_torch

_STEPS = 5
_RATES = (0.1, 0.01, 0.001)  # of descent: the first at which a rounding of the weights stays small
_SMALL = 1e-4

_State = dict[str, torch.Tensor]


def training_steps(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
) -> dict[str, Any]:
    """Returns outputs, gradients, and the parameters after five steps, as NumPy arrays by name.

    Dropout is left out. The module stays as it is. The `rate` is that of the steps: small enough
    that weights which are off by a rounding end as near to these, as after steps that are too
    large nobody can tell a wrong program from a rounding.
    """
    model = copy.deepcopy(model)
    model.train(train)
    for inner in model.modules():
        if _is_noise(inner):
            inner.eval()
    args, inputs = to_torch((tuple(args), dict(kwargs)), strict=False)
    with _WithoutDropout():
        return _run(model, args, inputs)


def _is_noise(module: torch.nn.Module) -> bool:
    """Tells whether a module can have no other modes than with and without noise."""
    held = (module.parameters(), module.buffers(), module.children())
    return not any(next(iter(one), None) is not None for one in held)


def _run(model: torch.nn.Module, args: Any, inputs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    first = copy.deepcopy(model)
    with torch.no_grad():
        for i, output in enumerate(_outputs(first, args, inputs)):
            found[f"output.{i}"] = output.numpy()
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not learned:
        return found
    for rate in _RATES:
        gradients, after = _descend(copy.deepcopy(model), args, inputs, rate)
        off = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in off.named_parameters():
                if name in learned:
                    waves = torch.cos(torch.arange(parameter.numel(), dtype=torch.float64))
                    parameter.mul_(1 + 2.0**-22 * waves.reshape(parameter.shape))
        if _distance(_descend(off, args, inputs, rate)[1], after) <= _SMALL:
            break
    if not gradients:
        return found
    found |= {f"gradient.{name}": gradient.numpy() for name, gradient in gradients.items()}
    found |= {f"after.{name}": parameter.numpy() for name, parameter in after.items()}
    return found | {"rate": torch.tensor(rate, dtype=torch.float64).numpy()}


def _descend(model: torch.nn.Module, args: Any, inputs: Any, rate: float) -> tuple[_State, _State]:
    """Takes the steps; returns the first gradients and the last parameters that have some."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first: _State = {}
    for step in range(_STEPS):
        loss = _loss(_outputs(model, args, inputs))
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            break
        gradients = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)
        with torch.no_grad():
            for (name, parameter), gradient in zip(learned.items(), gradients, strict=True):
                if gradient is None:
                    continue
                if step == 0:
                    first[name] = gradient.detach().clone()
                parameter.sub_(rate * gradient)
    return first, {name: p.detach() for name, p in learned.items() if name in first}


def _distance(found: _State, wanted: _State) -> float:
    """Returns how far parameters are apart, relative to the largest; infinite where one is not."""
    apart = [0.0]
    for name, one in wanted.items():
        largest = max(float(one.abs().max()), 1e-3) if one.numel() else 1.0
        off = float((found[name] - one).abs().max()) / largest if one.numel() else 0.0
        apart.append(off if math.isfinite(off) else math.inf)
    return max(apart)


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
