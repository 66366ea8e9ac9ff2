"""Lookup in tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import dimensions, lowering
from fmapper_adapters.jax.aten.types import dtype_of, wide


@lowering("aten::embedding", dims=dimensions.embedding)
def embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """Returns rows of a table; the row `padding_idx` gets no gradient.

    With `scale_grad_by_freq` the gradient of a row is divided by how often it is looked up.
    """
    if padding_idx >= 0:
        row = jnp.arange(weight.shape[0])[:, None] == padding_idx
        weight = jnp.where(row, jax.lax.stop_gradient(weight), weight)
    if weight.shape[0] == 0:  # jnp.take returns it unchanged
        return jnp.zeros((*indices.shape, *weight.shape[1:]), weight.dtype)
    rows = jnp.take(weight, indices, axis=0)
    if not scale_grad_by_freq:
        return rows
    counts = jnp.zeros((weight.shape[0],), dtype_of("int64")).at[indices].add(1)
    return _scaled_backwards(rows, jnp.take(counts, indices)[..., None])


@lowering("aten::embedding_renorm")
def embedding_renorm(weight: Any, indices: Any, max_norm: float, norm_type: float) -> jax.Array:
    """Returns the table with the rows that are looked up scaled down to a maximal norm."""
    looked_up = jnp.zeros((weight.shape[0],), bool).at[indices.reshape(-1)].set(True)
    norms = jnp.linalg.norm(weight.astype(wide(weight.dtype)), norm_type, 1, keepdims=True)
    shorter = weight * (max_norm / (norms + 1e-7)).astype(weight.dtype)
    return jnp.where(looked_up[:, None] & (norms > max_norm), shorter, weight)


@lowering("aten::embedding_bag.default", "aten::_embedding_bag",
          "aten::_embedding_bag_forward_only")  # fmt: skip
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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns sums (0), means (1) or maxima (2) of bags of rows; empty ones are zero.

    Args:
        weight: The table.
        indices: Rows of the table, the bags one after the other.
        offsets: Where bags begin.
        scale_grad_by_freq: Does not affect the result; if true, it has no gradient.
        mode: 0, 1 or 2.
        sparse: Ignored.
        per_sample_weights: A factor for each row, for sums.
        include_last_offset: Whether the last offset is the end of the last bag.
        padding_idx: A row that is left out, if it is not negative.

    Returns:
        The bags, the bag of each index, the bags' sizes, and the indices of the maxima.
    """
    count = offsets.shape[0] - int(include_last_offset)
    number = jnp.result_type(indices, offsets)
    at = jnp.arange(indices.shape[0], dtype=number)
    bag = jnp.searchsorted(offsets[:count].astype(number), at, side="right") - 1
    used = jnp.ones(indices.shape, bool)
    if padding_idx >= 0:
        used = indices != padding_idx
    rows = jnp.take(weight, indices, axis=0).astype(wide(weight.dtype))
    if scale_grad_by_freq:
        rows = _without_gradient(rows)
    sizes = jnp.zeros((count,), number).at[bag].add(used.astype(number))
    if include_last_offset and mode != _MAX:
        used = used & (at < offsets[count])
    if mode == _MAX:
        result, winners = _largest_rows(rows, bag, used, count)
        taken = jnp.take(indices, winners, axis=0, mode="clip").astype(number)
        return result.astype(weight.dtype), bag.astype(number), sizes, taken
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.astype(rows.dtype)[:, None]
    rows = jnp.where(used[:, None], rows, 0)
    result = jnp.zeros((count, weight.shape[1]), rows.dtype).at[bag].add(rows)
    if mode == _MEAN:
        result = result / jnp.maximum(sizes, 1).astype(rows.dtype)[:, None]
    return result.astype(weight.dtype), bag.astype(number), sizes, jnp.zeros((count,), number)


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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes `embedding_bag`; negative rows count from the end here."""
    left_out = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return embedding_bag(
        weight,
        indices,
        offsets,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        left_out,
    )


_MEAN, _MAX = 1, 2


@jax.custom_vjp
def _scaled_backwards(x: Any, by: Any) -> Any:
    return x


_scaled_backwards.defvjp(
    lambda x, by: (x, by), lambda by, gradient: (gradient / by.astype(gradient.dtype), None)
)


@jax.custom_jvp
def _without_gradient(x: Any) -> Any:
    return x


@_without_gradient.defjvp
def _no_jvp(primals: Any, tangents: Any) -> Any:
    # unlike documented, torch does not divide by how often a row is looked up
    raise ValueError("embedding_bag with scale_grad_by_freq=True has no gradient in JAX")


def _largest_rows(rows: Any, bag: Any, used: Any, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the maxima of each bag, and the (first) rows with these maxima."""
    masked = jax.lax.stop_gradient(jnp.where(used[:, None], rows, -jnp.inf))
    shape = (count, rows.shape[1])
    top = jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(masked)
    wins = (masked == top[bag]) & used[:, None]
    none = rows.shape[0]
    order = jnp.where(wins, jnp.arange(none)[:, None], none)
    winners = jnp.full(shape, none, order.dtype).at[bag].min(order)
    if none == 0:
        return jnp.zeros(shape, rows.dtype), winners
    largest = jnp.take_along_axis(rows, jnp.minimum(winners, none - 1), 0)
    return jnp.where(winners < none, largest, 0), winners


@lowering("aten::one_hot")
def one_hot(x: Any, num_classes: Any = -1) -> jax.Array:
    """Encodes indices as rows with a single one; -1 classes: as many as the largest index needs."""
    if isinstance(num_classes, int) and num_classes == -1:
        num_classes = int(jnp.max(x)) + 1
    return (x[..., None] == jnp.arange(num_classes)).astype(x.dtype)
