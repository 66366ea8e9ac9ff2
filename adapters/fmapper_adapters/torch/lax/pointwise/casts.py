"""Conversions between dtypes as in JAX on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax import types
from fmapper_adapters.torch.lax.pointwise.numbers import shift_right, widen


def convert(x: Any, source: str, dtype: torch.dtype, target: str = "") -> Any:
    """Converts a tensor to another dtype.

    Args:
        x: The tensor, in the dtype that carries it.
        source: Its dtype, by JAX's name.
        dtype: The dtype that carries the result.
        target: The dtype of the result by JAX's name, for integers.
    """
    if x.is_complex() and not dtype.is_complex:
        x = torch.real(x)
    if target == source or (x.dtype is dtype and not _integers(dtype)):
        return x
    if _integers(dtype):
        if x.is_floating_point():
            return _saturate(x, target or str(dtype).removeprefix("torch."), dtype)
        if types.is_carried(source) and dtype.itemsize > x.dtype.itemsize:
            return widen(x, dtype, types.bits_of(x.dtype))
        return x if x.dtype is dtype else x.to(dtype)
    if types.is_carried(source) and dtype is not torch.bool:
        return _from_unsigned(x, dtype)
    if dtype is torch.float8_e4m3fn:
        x = x.to(torch.float32) if x.dtype.itemsize == 1 else x
        x = torch.where(torch.abs(x) <= 464.0, x, torch.nan)  # torch saturates there
    return x.to(dtype)


def _integers(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _saturate(x: Any, target: str, dtype: torch.dtype) -> Any:
    """Converts floats to integers and saturates; NaN is zero."""
    bits = types.bits_of(dtype)
    low, high = (0, (1 << bits) - 1) if target.startswith("u") else (
        -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    )  # fmt: skip
    # in a dtype that holds the bounds
    wide = torch.float64 if bits == 32 or x.dtype is torch.float64 else torch.float32
    x = torch.nan_to_num(x if x.dtype is wide else x.to(wide), 0.0, torch.inf, -torch.inf)
    if bits < 64:
        return x.clamp(low, high).to(torch.int64).to(dtype)
    if not target.startswith("u"):
        whole = x.clamp(min=float(low)).to(torch.int64)
        return torch.where(x >= float(1 << 63), high, whole)
    half = float(1 << 63)
    whole = torch.where(x >= half, x - half, x.clamp(min=0.0)).to(torch.int64)
    whole = torch.where(x >= half, whole ^ -(1 << 63), whole)
    return torch.where(x >= 2 * half, -1, whole)


def _from_unsigned(x: Any, dtype: torch.dtype) -> Any:
    bits = types.bits_of(x.dtype)
    if bits < 64:
        return widen(x, torch.int64, bits).to(dtype)
    half = shift_right(x, 1) | (x & 1)  # rounds like all of the bits
    return torch.where(x < 0, half.to(dtype) * 2, x.to(dtype))
