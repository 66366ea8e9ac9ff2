"""Attention."""

from __future__ import annotations

import math
from typing import Any

from fmapper.nn.arguments import common, floating_kernels, shape_error


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """Computes `softmax(query @ key.T * scale + mask) @ value` (Vaswani et al., 2017).

    Args:
        query: Of shape (..., L, E).
        key: Of shape (..., S, E).
        value: Of shape (..., S, V).
        attn_mask: Broadcasts to (..., L, S): bool, true where a query may attend to a key, or
            floats that are added to the scores.
        is_causal: Whether a query attends only to keys up to its own position, counted from the
            front; not together with a mask.
        scale: The factor of the scores; None for 1 / sqrt(E).

    Returns:
        Of shape (..., L, V); zeros for a query whose bool mask excludes every key.
    """
    name = "scaled_dot_product_attention"
    floating_kernels(name, query, "query")
    functional = common(name, query, ("key", key), ("value", value), ("attn_mask", attn_mask))
    ranks = len(query.shape), len(key.shape), len(value.shape)
    if (
        min(ranks) < 2
        or query.shape[-1] != key.shape[-1]
        or key.shape[-2] != value.shape[-2]
        or len({*ranks}) > 1
    ):
        raise shape_error(
            name, "query (..., L, E), key (..., S, E), value (..., S, V)",
            query=query, key=key, value=value,
        )  # fmt: skip
    if is_causal and attn_mask is not None:
        raise ValueError(f"{name}: pass attn_mask or is_causal, not both")
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    return functional.attention(query, key, value, attn_mask, is_causal, scale)
