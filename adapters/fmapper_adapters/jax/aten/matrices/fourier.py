"""Discrete Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import lowering


def _scale(x: Any, count: Any, normalization: int) -> jax.Array:
    """Divides by nothing (0), by the root of the number of elements (1), or by the number (2)."""
    if normalization == 0:
        return x
    return x / (math.sqrt(count) if normalization == 1 else count)


def _along(x: Any, dims: Sequence[int], forward: bool) -> jax.Array:
    """Returns a complex transform that is not scaled, over any number of dimensions."""
    for start in range(0, len(dims), 3):  # XLA takes three at once
        part = tuple(dims[start : start + 3])
        x = jnp.fft.fftn(x, axes=part) if forward else jnp.fft.ifftn(x, axes=part, norm="forward")
    return x


def _count(x: Any, dims: Sequence[int]) -> Any:
    return math.prod(x.shape[d] for d in dims)


@lowering("aten::_fft_c2c")
def fft_c2c(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    """Transforms complex to complex."""
    return _scale(_along(x, dim, forward), _count(x, dim), normalization)


@lowering("aten::_fft_r2c")
def fft_r2c(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    """Transforms real to complex; one-sided, the last dimension has only half the frequencies."""
    half = jnp.fft.rfft(x, axis=dim[-1]) if onesided else None
    y = _along(x, dim, True) if half is None else _along(half, dim[:-1], True)
    return _scale(y, _count(x, dim), normalization)


@lowering("aten::_fft_c2r")
def fft_c2r(x: Any, dim: Sequence[int], normalization: int, last_dim_size: Any) -> jax.Array:
    """Transforms complex to real, from half the frequencies in the last of the dimensions."""
    y = _along(x, dim[:-1], False)
    y = jnp.fft.irfft(y, last_dim_size, axis=dim[-1], norm="forward")
    return _scale(y, _count(x, dim[:-1]) * last_dim_size, normalization)
