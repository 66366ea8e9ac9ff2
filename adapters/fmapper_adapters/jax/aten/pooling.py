"""Pooling."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import wide


@lowering("aten::adaptive_avg_pool1d", "aten::adaptive_avg_pool2d", "aten::adaptive_avg_pool3d",
          "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d")  # fmt: skip
def adaptive_avg_pool(x: Any, output_size: Any) -> jax.Array:
    """Means over bins: bin i of m is from floor(i n / m) to ceil((i + 1) n / m)."""
    y = x.astype(wide(x.dtype))
    sizes = output_size if isinstance(output_size, tuple) else (output_size,)
    for dim, m in enumerate(sizes, x.ndim - len(sizes)):
        n = y.shape[dim]
        if isinstance(m, int) and m == 1:
            y = jnp.mean(y, dim, keepdims=True)
        elif n % m == 0:
            y = jnp.mean(y.reshape(*y.shape[:dim], m, n // m, *y.shape[dim + 1 :]), dim + 1)
        else:
            bins = [slice(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
            means = [jnp.mean(y[(slice(None),) * dim + (b,)], dim, keepdims=True) for b in bins]
            y = jnp.concatenate(means, dim)
    return y.astype(x.dtype)
