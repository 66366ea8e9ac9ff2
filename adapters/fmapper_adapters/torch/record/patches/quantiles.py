"""Quantiles by operations that can be recorded; torch's own before 2.13 read values.

They interpolate between the two neighbours of a rank, by any of torch's methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor

_WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "lower": torch.floor,
    "higher": torch.ceil,
    "nearest": torch.round,
}


def quantile(
    input: Tensor,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    """Computes `torch.quantile`; rows with NaN return NaN."""
    rows = _sort(input, dim)
    ranks = _fractions(q, input) * (rows.shape[-1] - 1)
    ranks = torch.where(rows[..., -1:].isnan(), rows.shape[-1] - 1, ranks)
    return _arrange(_at(rows, ranks, interpolation), input, q, dim, keepdim)


def nanquantile(
    input: Tensor,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    """Computes `torch.nanquantile`, without NaN."""
    rows = _sort(input, dim)
    last = (rows.isnan().logical_not().sum(-1, keepdim=True) - 1).clamp(min=0)
    return _arrange(_at(rows, _fractions(q, input) * last, interpolation), input, q, dim, keepdim)


def _sort(x: Tensor, dim: int | None) -> Tensor:
    """Returns the rows sorted in the last dimension, with NaN at the end."""
    rows = x.reshape(-1) if dim is None or not x.ndim else x.movedim(dim, -1)
    return rows.sort(-1)[0]


def _fractions(q: Any, like: Tensor) -> Tensor:
    return q.reshape(-1) if isinstance(q, Tensor) else like.new_full((1,), q)


def _at(rows: Tensor, ranks: Tensor, interpolation: str) -> Tensor:
    if interpolation in _WHOLE:
        return rows.gather(-1, _WHOLE[interpolation](ranks).long())
    below = rows.gather(-1, ranks.floor().long())
    above = rows.gather(-1, ranks.ceil().long())
    weights = ranks - ranks.floor()
    return below.lerp(
        above, torch.full_like(weights, 0.5) if interpolation == "midpoint" else weights
    )


def _arrange(quantiles: Tensor, x: Tensor, q: Any, dim: int | None, keepdim: bool) -> Tensor:
    """Puts several quantiles first; a single one has no dimension."""
    quantiles = quantiles.movedim(-1, 0)
    if keepdim and dim is None:
        quantiles = quantiles.reshape(-1, *[1] * x.ndim)
    elif keepdim and x.ndim and dim is not None:
        quantiles = quantiles.unsqueeze(dim % x.ndim + 1)
    return quantiles if isinstance(q, Tensor) and q.ndim else quantiles.squeeze(0)
