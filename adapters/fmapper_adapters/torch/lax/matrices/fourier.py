"""Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax.table import Avals, lax
from fmapper_adapters.torch.model.emit import current

# By JAX's number of the kind.
_KINDS = {0: torch.fft.fftn, 1: torch.fft.ifftn, 2: torch.fft.rfftn, 3: torch.fft.irfftn}
_SINGLE = {0: torch.fft.fft, 1: torch.fft.ifft, 2: torch.fft.rfft, 3: torch.fft.irfft}
_NAMES = {"fft": 0, "ifft": 1, "rfft": 2, "irfft": 3}


@lax("fft", takes_avals=True)
def fft(x: Any, *, fft_type: int | str, fft_lengths: tuple[int, ...], avals: Avals) -> Any:
    """Computes a transform over the last dimensions, one for each length."""
    dtype, shape = avals.results[0]
    if 0 in x.shape:  # torch's transforms may fail for empty tensors
        return current().make(torch.zeros, shape, dtype=current().dtype(dtype))
    kind = _NAMES[fft_type] if isinstance(fft_type, str) else fft_type
    if len(fft_lengths) == 1:
        return _SINGLE[kind](x, fft_lengths[0])
    dims = tuple(range(-len(fft_lengths), 0))
    return _KINDS[kind](x, tuple(fft_lengths), dims)
