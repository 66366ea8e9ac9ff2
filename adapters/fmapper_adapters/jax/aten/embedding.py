"""Lookup in tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering


@lowering("aten::embedding")
def embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """Rows of a table; the row `padding_idx` gets no gradient."""
    if padding_idx >= 0:
        row = jnp.arange(weight.shape[0])[:, None] == padding_idx
        weight = jnp.where(row, jax.lax.stop_gradient(weight), weight)
    return jnp.take(weight, indices, axis=0)
