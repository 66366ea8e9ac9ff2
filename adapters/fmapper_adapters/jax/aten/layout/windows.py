"""Window functions and the frequencies of transforms: arrays made from a size."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special

from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import default_dtype, wide


def _phases(size: Any, periodic: bool, dtype: Any) -> tuple[jax.Array, Any]:
    """Returns the position of each element in the window, from 0 to 1, and the result's dtype."""
    dtype = default_dtype() if dtype is None else dtype
    steps = size if periodic else size - 1
    return jnp.arange(size).astype(wide(dtype)) / max(steps, 1), dtype


@lowering("aten::hamming_window")
def hamming_window(
    size: Any, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, *, dtype: Any = None
) -> jax.Array:
    """Returns the Hamming window, a cosine that does not reach zero."""
    at, dtype = _phases(size, periodic, dtype)
    window = alpha - beta * jnp.cos(2 * math.pi * at)
    return (jnp.ones_like(at) if size == 1 else window).astype(dtype)


@lowering("aten::hann_window")
def hann_window(size: Any, periodic: bool = True, *, dtype: Any = None) -> jax.Array:
    """Returns the Hann window, a cosine that reaches zero."""
    return hamming_window(size, periodic, 0.5, 0.5, dtype=dtype)


@lowering("aten::blackman_window")
def blackman_window(size: Any, periodic: bool = True, *, dtype: Any = None) -> jax.Array:
    """Returns the Blackman window, a sum of two cosines."""
    at, dtype = _phases(size, periodic, dtype)
    window = 0.42 - 0.5 * jnp.cos(2 * math.pi * at) + 0.08 * jnp.cos(4 * math.pi * at)
    return (jnp.ones_like(at) if size == 1 else window).astype(dtype)


@lowering("aten::bartlett_window")
def bartlett_window(size: Any, periodic: bool = True, *, dtype: Any = None) -> jax.Array:
    """Returns the Bartlett window, a triangle."""
    at, dtype = _phases(size, periodic, dtype)
    return (jnp.ones_like(at) if size == 1 else 1 - jnp.abs(2 * at - 1)).astype(dtype)


@lowering("aten::kaiser_window")
def kaiser_window(
    size: Any, periodic: bool = True, beta: float = 12.0, *, dtype: Any = None
) -> jax.Array:
    """Returns the Kaiser window, a ratio of Bessel functions."""
    at, dtype = _phases(size, periodic, dtype)
    height = beta * jnp.sqrt(jnp.maximum(1 - (2 * at - 1) ** 2, 0))
    window = jax.scipy.special.i0e(height) * jnp.exp(height - beta)
    window = window / jax.scipy.special.i0e(jnp.asarray(beta, window.dtype))
    return (jnp.ones_like(at) if size == 1 else window).astype(dtype)


@lowering("aten::fft_fftfreq")
def fft_fftfreq(n: Any, d: float = 1.0, *, dtype: Any = None) -> jax.Array:
    """Returns the frequencies of a transform of n elements, the negative ones last."""
    at = jnp.arange(n)
    dtype = default_dtype() if dtype is None else dtype
    return (jnp.where(at < (n + 1) // 2, at, at - n).astype(wide(dtype)) / (n * d)).astype(dtype)


@lowering("aten::fft_rfftfreq")
def fft_rfftfreq(n: Any, d: float = 1.0, *, dtype: Any = None) -> jax.Array:
    """Returns the frequencies of a transform of n real elements."""
    dtype = default_dtype() if dtype is None else dtype
    return (jnp.arange(n // 2 + 1).astype(wide(dtype)) / (n * d)).astype(dtype)
