"""Sums, maxima and the like over dimensions."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax._table import lax


@lax("reduce_sum")
def reduce_sum(x: Any, *, axes: tuple[int, ...]) -> Any:
    return torch.sum(x, axes, dtype=x.dtype) if axes else x


@lax("reduce_max")
def reduce_max(x: Any, *, axes: tuple[int, ...]) -> Any:
    return torch.amax(x, axes) if axes else x
