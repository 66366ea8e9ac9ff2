"""Gives a module the same random numbers as its translation during a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fmapper.verification import Draws
from fmapper_adapters.torch._private import TorchDispatchMode


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the random numbers of operations by numbers of `Draws`.

    Operations that are not in the table below draw their own numbers.

    Attributes:
        draws: The source of numbers.
        has_drawn: Whether any operation has drawn.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = Draws()
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, _, overload = str(func).removeprefix("aten.").partition(".")
        draw = _DRAWS.get(f"{name}.{overload}") or _DRAWS.get(name)
        if draw is None:
            return func(*args, **kwargs)
        self.has_drawn = True
        takes = {key: value for key, value in kwargs.items() if key not in _OPTIONS}
        drawn = draw(self._take, *args, **takes)
        if name.endswith("_"):
            return args[0].copy_(drawn)
        like = args[0] if args and isinstance(args[0], torch.Tensor) else None
        dtype = kwargs.get("dtype") or (like.dtype if like is not None else None)
        if dtype is None:
            dtype = torch.int64 if name.startswith("randint") else torch.get_default_dtype()
        return drawn.to(torch.int64 if name == "randperm" and "dtype" not in kwargs else dtype)

    def _take(self, kind: str, shape: Any) -> torch.Tensor:
        return torch.from_numpy(self.draws.take(kind, shape))


_OPTIONS = frozenset(
    {"dtype", "layout", "device", "pin_memory", "memory_format", "generator", "requires_grad"}
)
Take = Callable[[str, Any], torch.Tensor]


def _normal(take: Take, mean: Any, std: Any = 1.0, size: Any = None) -> torch.Tensor:
    shape = np.broadcast_shapes(np.shape(mean), np.shape(std)) if size is None else size
    drawn = take("normal", shape)
    return drawn.mul(std).add(mean)


def _whole(take: Take, low: Any, high: Any, size: Any) -> torch.Tensor:
    return (take("uniform", size) * (int(high) - int(low))).floor() + int(low)


def _exponential(take: Take, x: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return -torch.log1p(-take("uniform", x.shape)) / rate


_DRAWS: dict[str, Callable[..., torch.Tensor]] = {
    "randn": lambda take, size: take("normal", size),
    "randn_like": lambda take, x: take("normal", x.shape),
    "normal": _normal,
    "normal_": lambda take, x, mean=0.0, std=1.0: take("normal", x.shape) * std + mean,
    "normal_functional": lambda take, x, mean=0.0, std=1.0: take("normal", x.shape) * std + mean,
    "log_normal_": lambda take, x, mean=1.0, std=2.0: (take("normal", x.shape) * std + mean).exp(),
    "rand": lambda take, size: take("uniform", size),
    "rand_like": lambda take, x: take("uniform", x.shape),
    "uniform_": lambda take, x, low=0.0, high=1.0: take("uniform", x.shape) * (high - low) + low,
    "bernoulli": lambda take, x: take("uniform", x.shape) < x,
    "bernoulli.p": lambda take, x, p=0.5: take("uniform", x.shape) < p,
    "bernoulli_": lambda take, x, p=0.5: take("uniform", x.shape) < p,
    "exponential_": _exponential,
    "randint": lambda take, high, size: _whole(take, 0, high, size),
    "randint.low": _whole,
    "randint_like": lambda take, x, high: _whole(take, 0, high, x.shape),
    "randint_like.low_dtype": lambda take, x, low, high: _whole(take, low, high, x.shape),
    "randperm": lambda take, n: take("uniform", (n,)).argsort(stable=True),
}
