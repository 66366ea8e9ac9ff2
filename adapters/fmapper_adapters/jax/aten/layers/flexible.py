"""Attention with functions of the positions for scores and mask: `flex_attention`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import wide

Function = Callable[..., Any]


@lowering("higher_order::flex_attention")
def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Function,
    block_mask: Sequence[Any],
    scale: float,
    options: Any = None,
    score_arrays: Sequence[Any] = (),
    mask_arrays: Sequence[Any] = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the results, and the sums of exponentials and the largest scores, as log2.

    The block mask only marks blocks that its last element, the mask function, masks entirely.
    """
    groups = query.shape[1] // key.shape[1]
    dtype = wide(query.dtype)
    queries, keys = query.astype(dtype), jnp.repeat(key, groups, 1).astype(dtype)
    scores = jnp.einsum("bhqe,bhke->bhqk", queries, jnp.broadcast_to(keys, _like(keys, query)))
    places = [jnp.arange(size) for size in scores.shape]
    changed = _everywhere(score_mod, len(score_arrays), 1)(scores * scale, *places, *score_arrays)
    kept = _everywhere(block_mask[-1], len(mask_arrays), 0)(*places, *mask_arrays)
    changed = jnp.where(kept, changed.astype(dtype), -jnp.inf)
    largest = changed.max(-1)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    weights = jnp.exp(changed - shift[..., None])
    sums = weights.sum(-1)
    weights = weights / jnp.where(sums == 0, 1, sums)[..., None]
    values = jnp.repeat(value, groups, 1)
    values = jnp.broadcast_to(values, _like(values, query))
    result = jnp.einsum("bhqk,bhke->bhqe", weights.astype(query.dtype), values.astype(query.dtype))
    return result, (jnp.log(sums) + shift) / math.log(2), largest / math.log(2)


def _like(x: Any, query: Any) -> tuple[int, ...]:
    """Returns the shape of keys or values with the batch size of the queries."""
    return (query.shape[0], *x.shape[1:])


def _everywhere(function: Function, arrays: int, scores: int) -> Function:
    """Lifts a function of one position to all positions at once; arrays are shared."""

    def apply(*args: Any) -> Any:
        result = function(*args)
        return result[0] if isinstance(result, tuple) else result

    for dim in (3, 2, 1, 0):
        at: list[int | None] = [None] * 4
        at[dim] = 0
        apply = jax.vmap(apply, in_axes=(*[0] * scores, *at, *[None] * arrays))
    return apply
