"""Exponentials, logarithms, roots and the functions of angles."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax._integers import as_tensor
from fmapper_adapters.torch.lax._table import lax


def _one(name: str, function: Any) -> None:
    """Enters a function of torch for a primitive without parameters."""

    def lowered(x: Any) -> Any:
        return function(x)

    lax(name)(lowered)


_SAME = ("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh")
_SAME += ("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh")
for _name in _SAME:
    _one(_name, getattr(torch, _name))
_one("logistic", torch.sigmoid)


@lax("cbrt")
def cbrt(x: Any) -> Any:
    sign = torch.copysign(torch.ones_like(x), x)
    size = x * sign
    root = torch.pow(size, 1 / 3)
    fixed = root.detach()
    step = (fixed - size.detach() / (fixed * fixed)) / 3  # one step of Newton's
    return torch.where(torch.isfinite(step), root - step, root) * sign


@lax("atan2", numbers=True)
def atan2(x: Any, y: Any) -> Any:
    x, y = as_tensor(x, y), as_tensor(y, x)
    if not x.is_complex():
        return torch.atan2(x, y)
    return -1j * torch.log((y + 1j * x) / torch.sqrt(x * x + y * y))
