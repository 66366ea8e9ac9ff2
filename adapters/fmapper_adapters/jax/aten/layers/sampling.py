"""Images looked up at given positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.layers.upsampling import cubic_weights
from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import cast, wide

_NEAREST, _BICUBIC = 1, 2
_ZEROS, _BORDER = 0, 1


@lowering("aten::affine_grid_generator")
def affine_grid(theta: Any, size: Sequence[Any], align_corners: bool) -> jax.Array:
    """Returns the positions, from -1 to 1, of all pixels under affine maps (batch, d, d + 1)."""
    spatial = size[2:]
    lines = []
    for n in spatial:
        if align_corners:
            is_single = isinstance(n, int) and n == 1
            line = (
                jnp.zeros((1,), theta.dtype)
                if is_single
                else jnp.linspace(-1, 1, n, dtype=theta.dtype)
            )
        else:
            line = ((jnp.arange(n) * 2 + 1) / n - 1).astype(theta.dtype)
        lines.append(line)
    grids = jnp.meshgrid(*lines, indexing="ij")
    base = jnp.stack([*reversed(grids), jnp.ones_like(grids[0])], -1)
    flat = base.reshape(1, -1, len(spatial) + 1)
    moved = flat @ jnp.swapaxes(theta, 1, 2)
    return moved.reshape(theta.shape[0], *spatial, len(spatial))


@lowering("aten::grid_sampler", "aten::grid_sampler_2d", "aten::grid_sampler_3d",
          "aten::_grid_sampler_2d_cpu_fallback")  # fmt: skip
def grid_sample(
    x: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    """Samples x (batch, channels, *space) at positions (batch, *out, dimensions) from -1 to 1.

    The last dimension of the grid counts the dimensions of x from the last one on.
    """
    sizes = x.shape[2:]
    dtype = wide(x.dtype)
    y, where = x.astype(dtype), grid.astype(wide(grid.dtype))
    at = [_pixels(where[..., len(sizes) - 1 - i], n, align_corners) for i, n in enumerate(sizes)]
    if interpolation_mode == _BICUBIC:
        return _bicubic(y, at, padding_mode, align_corners).astype(x.dtype)
    at = [_inside(p, n, padding_mode, align_corners) for p, n in zip(at, sizes, strict=True)]
    if interpolation_mode == _NEAREST:
        return _lookup(y, [jnp.round(p) for p in at], 0.0).astype(x.dtype)
    lows = [jnp.floor(p) for p in at]
    total: Any = 0
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        weight: Any = 1
        for c, p, low in zip(corner, at, lows, strict=True):
            weight = weight * (p - low if c else low + 1 - p)
        places = [low + c for low, c in zip(lows, corner, strict=True)]
        total = total + _lookup(y, places, 0.0) * weight[:, None]
    return total.astype(x.dtype)


def _pixels(at: Any, n: Any, align_corners: bool) -> jax.Array:
    """Returns positions from -1 to 1 in pixels."""
    return (at + 1) / 2 * (n - 1) if align_corners else ((at + 1) * n - 1) / 2


def _inside(at: Any, n: Any, padding_mode: int, align_corners: bool) -> jax.Array:
    """Moves positions into the image if the padding mode requires it."""
    if padding_mode == _ZEROS:
        return at
    if padding_mode == _BORDER:
        return _clip(at, n)
    low, high = (0, 2 * (n - 1)) if align_corners else (-1, 2 * n - 1)
    return _clip(_reflect(at, low, high), n)


def _clip(at: Any, n: Any) -> jax.Array:
    # torch's gradient at the borders themselves is zero
    inside = (at > 0) & (at < n - 1)
    clipped = jnp.clip(jax.lax.stop_gradient(at), 0, n - 1)
    return jnp.where(inside, at, clipped)


def _reflect(at: Any, twice_low: Any, twice_high: Any) -> jax.Array:
    if isinstance(twice_high, int) and twice_low == twice_high:
        return jnp.zeros_like(at)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    distance = jnp.abs(at - low)
    flips = jax.lax.stop_gradient(jnp.floor(distance / span))
    extra = distance - flips * span
    return jnp.where(flips % 2 == 0, extra + low, span - extra + low)


def _lookup(x: Any, places: Sequence[Any], outside: float) -> jax.Array:
    """Looks up x (batch, channels, *space) at whole positions (batch, *out); zero outside of x."""
    batch, channels, *sizes = x.shape
    inside: Any = True
    flat: Any = 0
    for p, n in zip(places, sizes, strict=True):
        inside = inside & (p >= 0) & (p <= n - 1)
        flat = flat * n + jnp.clip(p, 0, n - 1).astype("int32")
    rows = x.reshape(batch, channels, math.prod(sizes))
    picked = jnp.take_along_axis(rows, flat.reshape(batch, 1, -1), -1, mode="clip")
    picked = picked.reshape(batch, channels, *flat.shape[1:])
    return jnp.where(inside[:, None], picked, cast(outside, x.dtype))


def _bicubic(x: Any, at: Sequence[Any], padding_mode: int, align_corners: bool) -> jax.Array:
    lows = [jnp.floor(p) for p in at]
    weights = [cubic_weights(p - low) for p, low in zip(at, lows, strict=True)]
    total: Any = 0
    for i in range(4):
        row: Any = 0
        for j in range(4):
            places = [lows[0] + (i - 1), lows[1] + (j - 1)]
            places = [
                jnp.round(_inside(p, n, padding_mode, align_corners))
                for p, n in zip(places, x.shape[2:], strict=True)
            ]
            row = row + _lookup(x, places, 0.0) * weights[1][j][:, None]
        total = total + row * weights[0][i][:, None]
    return total
