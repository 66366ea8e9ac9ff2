"""Converts indices to torch's form: int64, in bounds."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax import types
from fmapper_adapters.torch.model.emit import current


def index(x: Any, dtype: str) -> Any:
    """Converts an index of any integer dtype to int64 or a number.

    Args:
        x: A tensor, or a number.
        dtype: The dtype of x in JAX.
    """
    if isinstance(x, int):
        return x + (1 << types.bits_of(types.carrier_of(dtype))) if _wraps(x, dtype) else x
    if dtype == "uint64":  # indices beyond int64 are out of bounds anyway
        return torch.where(x < 0, torch.iinfo(torch.int64).max, x)
    if types.is_carried(dtype):
        return x.to(torch.int64) & ((1 << types.bits_of(x.dtype)) - 1)
    return x if x.dtype is torch.int64 else x.to(torch.int64)


def _wraps(x: int, dtype: str) -> bool:
    return x < 0 and types.is_carried(dtype)


def clamp(start: Any, high: Any) -> Any:
    """Clamps a start index to bounds, as in JAX's dynamic slices."""
    if isinstance(start, int) and isinstance(high, int):
        return min(max(start, 0), high)
    if isinstance(start, int):  # the bound varies
        return torch.sym_min(start, high) if start > 0 else 0
    return torch.clamp(start, 0, high)


def steps(count: Any) -> Any:
    """Returns the integers from 0 to `count - 1`, as int64."""
    return current().make(torch.arange, count)


def window(start: Any, count: Any) -> Any:
    """Returns the indices of `count` elements from a start on, in one dimension."""
    if isinstance(count, int) and count == 1:
        return start.unsqueeze(0)
    return start + steps(count)
