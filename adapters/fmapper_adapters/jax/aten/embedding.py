"""Lookup in tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import wide


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


@lowering("aten::embedding_renorm")
def embedding_renorm(weight: Any, indices: Any, max_norm: float, norm_type: float) -> jax.Array:
    """The table, with the rows that are looked up made no longer than a norm."""
    looked_up = jnp.zeros((weight.shape[0],), bool).at[indices.reshape(-1)].set(True)
    norms = jnp.linalg.norm(weight.astype(wide(weight.dtype)), norm_type, 1, keepdims=True)
    shorter = weight * (max_norm / (norms + 1e-7)).astype(weight.dtype)
    return jnp.where(looked_up[:, None] & (norms > max_norm), shorter, weight)


@lowering("aten::embedding_bag.padding_idx")
def embedding_bag_with_padding(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    include_last_offset: bool,
    padding_idx: int | None,
) -> tuple[jax.Array, ...]:
    """As embedding_bag, where one row counts as nothing."""
    return embedding_bag(
        weight,
        indices,
        offsets,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        -1 if padding_idx is None else padding_idx % weight.shape[0],
    )


@lowering("aten::embedding_bag", "aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[jax.Array, ...]:
    """Rows of a table combined bag by bag: their sum, mean (1) or maximum (2); zero without rows.

    Args:
        weight: The table.
        indices: The rows of all bags, one after the other.
        offsets: Where each bag begins.
        scale_grad_by_freq: Of no effect on the result.
        mode: How rows are combined.
        sparse: Of no effect on the result.
        per_sample_weights: Factors of the rows, for sums.
        include_last_offset: Whether `offsets` ends with the end of the last bag.
        padding_idx: A row that counts as nothing; -1 for none.

    Returns:
        The bags, the bag of each row, the sizes of the bags, and the rows that were largest.
    """
    bags = offsets.shape[0] - (1 if include_last_offset else 0)
    count = indices.shape[0]
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(count), side="right") - 1
    kept = indices != padding_idx if padding_idx >= 0 else jnp.ones((count,), bool)
    if include_last_offset:
        kept = kept & (jnp.arange(count) < offsets[bags])
    dtype = wide(weight.dtype)
    rows = jnp.take(weight, indices, axis=0).astype(dtype)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.astype(dtype)[:, None]
    sizes = jnp.zeros((bags,), indices.dtype).at[bag].add(kept.astype(indices.dtype))
    found = jnp.zeros((bags, weight.shape[1]), dtype)
    largest = jnp.zeros((bags, weight.shape[1]) if mode == 2 else (bags,), indices.dtype)
    if mode == 2:
        low = jnp.full_like(found, -jnp.inf).at[bag].max(jnp.where(kept[:, None], rows, -jnp.inf))
        found = jnp.where(sizes[:, None] > 0, low, 0)
        places = jnp.where((rows == low[bag]) & kept[:, None], jnp.arange(count)[:, None], count)
        first = jnp.full((bags, weight.shape[1]), count).at[bag].min(places)
        largest = jnp.where(first < count, indices[jnp.minimum(first, count - 1)], -1)
        # One row gets the gradient where several are as large.
        chosen = jnp.take_along_axis(rows, jnp.minimum(first, count - 1), 0)
        found = jnp.where(sizes[:, None] > 0, chosen, 0)
    else:
        found = found.at[bag].add(jnp.where(kept[:, None], rows, 0))
        if mode == 1:
            found = found / jnp.maximum(sizes, 1)[:, None].astype(dtype)
    return found.astype(weight.dtype), bag, sizes, largest
