"""Optimisers by name, in NumPy, so that both models use the same one in any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fmapper.errors import ConversionError
from fmapper.suggest import did_you_mean
from fmapper.verification.arrays import widen
from fmapper.verification.models.trial import Stepper

Update = Callable[[Any, dict[str, Any], int], Any]


def _sgd(gradient: Any, memory: dict[str, Any], count: int) -> Any:
    return gradient


def _momentum(gradient: Any, memory: dict[str, Any], count: int) -> Any:
    memory["mean"] = 0.9 * memory.get("mean", 0.0) + gradient
    return memory["mean"]


def _adam(gradient: Any, memory: dict[str, Any], count: int) -> Any:
    """Computes the update of Kingma and Ba (2015), with their constants."""
    import numpy as np

    memory["mean"] = 0.9 * memory.get("mean", 0.0) + 0.1 * gradient
    memory["square"] = 0.999 * memory.get("square", 0.0) + 0.001 * np.abs(gradient) ** 2
    mean, square = memory["mean"] / (1 - 0.9**count), memory["square"] / (1 - 0.999**count)
    return mean / (np.sqrt(square) + 1e-8)


_UPDATES: Mapping[str, Update] = {"sgd": _sgd, "momentum": _momentum, "adam": _adam}


def check_name(name: str) -> None:
    """Raises for an unknown optimiser.

    Raises:
        ConversionError: It is unknown; lists the known ones.
    """
    if name not in _UPDATES:
        raise ConversionError(
            f"optimizer={name!r} is not one of {', '.join(_UPDATES)}."
            f"{did_you_mean(name, _UPDATES)} Pass a pair of optimizers of the frameworks: "
            "(torch.optim.AdamW(...), optax.adamw(...))"
        )


def stepper(name: str, rate: float) -> Stepper:
    """Returns a stepper of an optimiser, which keeps weights without a gradient."""
    memory: dict[str, dict[str, Any]] = {}
    count = 0

    def step(weights: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal count
        count += 1
        after = dict(weights)
        for key, gradient in gradients.items():
            update = _UPDATES[name](widen(gradient), memory.setdefault(key, {}), count)
            old = weights[key]
            after[key] = (widen(old) - rate * update).astype(old.dtype)
        return after

    return step
