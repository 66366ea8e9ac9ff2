"""Exponentials, logarithms, roots and trigonometric functions."""

from __future__ import annotations

import math
from typing import Any

import torch

from fmapper_adapters.torch.lax.pointwise.numbers import as_tensor
from fmapper_adapters.torch.lax.table import lax, pointwise


def _one(name: str, function: Any) -> None:
    """Registers a function of torch for a primitive without parameters."""

    def lower(x: Any) -> Any:
        return function(x)

    lax(name, dims=pointwise)(lower)


_SAME: tuple[str, ...] = ("exp", "expm1", "log", "log1p", "rsqrt", "sin", "cos", "tan", "tanh")
_SAME += ("atan", "asinh", "atanh")
for _name in _SAME:
    _one(_name, getattr(torch, _name))
_one("logistic", torch.sigmoid)


def _cut(name: str, function: Any) -> None:
    """Registers a function for which JAX ignores the sign of zero at the branch cut."""

    def lower(x: Any) -> Any:
        return function(x + 0.0 if x.is_complex() else x)

    lax(name, dims=pointwise)(lower)


for _name in ("sqrt", "asin", "acos", "acosh"):
    _cut(_name, getattr(torch, _name))


def _hyperbolic(name: str, function: Any) -> None:
    """Registers a hyperbolic function that is finite where torch's exponential overflows."""

    def lower(x: Any) -> Any:
        if x.is_complex():
            return function(x)
        if x.dtype.itemsize < 4:
            return lower(x.to(torch.float32)).to(x.dtype)
        size = torch.abs(x)
        large = size > (700.0 if x.dtype is torch.float64 else 85.0)
        half = torch.exp(torch.where(large, size, 0.0) - math.log(2))
        if name == "sinh":
            half = torch.where(x < 0, -half, half)  # `copysign` has no derivative at infinity
        return torch.where(large, half, function(torch.where(large, 0.0, x)))

    lax(name, dims=pointwise)(lower)


for _name in ("sinh", "cosh"):
    _hyperbolic(_name, getattr(torch, _name))


@lax("exp2", dims=pointwise)
def exp2(x: Any) -> Any:
    if x.dtype in (torch.float16, torch.bfloat16):  # JAX rounds the product
        return torch.exp(x * float(torch.tensor(math.log(2), dtype=x.dtype)))
    return torch.exp2(x)


@lax("log2")
def log2(x: Any) -> Any:
    if x.dtype in (torch.float16, torch.bfloat16):  # JAX rounds the logarithm and the factor
        return torch.log(x) * float(torch.tensor(1 / math.log(2), dtype=x.dtype))
    return torch.log2(x)


@lax("cbrt", dims=pointwise)
def cbrt(x: Any) -> Any:
    sign = torch.copysign(torch.ones_like(x), x)
    size = x * sign
    root = torch.pow(size, 1 / 3)
    fixed = root.detach()
    step = (fixed - size.detach() / (fixed * fixed)) / 3  # one step of Newton's method
    return torch.where(torch.isfinite(step), root - step, root) * sign


@lax("atan2", takes_numbers=True, dims=pointwise)
def atan2(x: Any, y: Any) -> Any:
    x, y = as_tensor(x, y), as_tensor(y, x)
    if not x.is_complex():
        return torch.atan2(x, y)
    return -1j * torch.log((y + 1j * x) / torch.sqrt(x * x + y * y))
