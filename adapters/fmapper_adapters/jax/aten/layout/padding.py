"""Padding around arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import cast


@lowering("aten::constant_pad_nd", int64="moves", elements=(2,))
def constant_pad(x: Any, pad: Sequence[Any], value: Any = 0) -> jax.Array:
    """Pads the last dimensions with a value, beginning with the last; negative widths crop."""
    widths = [(0, 0, 0)] * (x.ndim - len(pad) // 2)
    widths += [(low, high, 0) for low, high in _per_dim(pad)]
    return jax.lax.pad(x, cast(value, x.dtype), widths)


def _per_dim(pad: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns the widths at both ends of the last dimensions, in order."""
    return [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]


def _pad(x: Any, pad: Sequence[Any], index: Any) -> jax.Array:
    """Pads by lookup: each dimension at `index(positions, size)`, for positions from `-low` on."""
    widths = _per_dim(pad)
    for dim, (low, high) in enumerate(widths, x.ndim - len(widths)):
        if isinstance(low, int) and isinstance(high, int) and low == high == 0:
            continue
        size = x.shape[dim]
        at = index(jnp.arange(size + low + high) - low, size)
        x = jnp.take(x, at, axis=dim, mode="clip")
    return x


@lowering("aten::reflection_pad1d", "aten::reflection_pad2d", "aten::reflection_pad3d")
def reflection_pad(x: Any, padding: Sequence[Any]) -> jax.Array:
    """Pads by mirroring at the edges, which are not repeated."""
    return _pad(x, padding, lambda at, size: size - 1 - jnp.abs(size - 1 - jnp.abs(at)))


@lowering("aten::replication_pad1d", "aten::replication_pad2d", "aten::replication_pad3d")
def replication_pad(x: Any, padding: Sequence[Any]) -> jax.Array:
    """Pads by repeating the elements at the edges."""
    return _pad(x, padding, lambda at, size: jnp.clip(at, 0, size - 1))


@lowering("aten::_pad_circular")
def circular_pad(x: Any, pad: Sequence[Any]) -> jax.Array:
    """Pads with the elements from the other side."""
    return _pad(x, pad, jnp.remainder)


@lowering("aten::pad")
def pad(x: Any, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> jax.Array:
    """Pads in the given mode."""
    if mode == "constant":
        return constant_pad(x, pad, 0 if value is None else value)
    return {"reflect": reflection_pad, "replicate": replication_pad, "circular": circular_pad}[
        mode
    ](x, pad)
