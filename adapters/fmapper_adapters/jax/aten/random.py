"""Random numbers: each operation gets a key of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import cast, is_floating


@lowering("aten::dropout", random=True)
def dropout(x: Any, p: float, train: bool, *, key: Any) -> jax.Array:
    """Elements are zero with probability p, and the others 1 / (1 - p) times what they were."""
    return native_dropout(x, p, train, key=key)[0]


@lowering("aten::native_dropout", random=True)
def native_dropout(x: Any, p: float, train: Any, *, key: Any) -> tuple[jax.Array, jax.Array]:
    """As dropout, and the mask of what is kept."""
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(key, 1.0 - p, x.shape)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    scaled = x * cast(scale, x.dtype) if is_floating(x) else x * scale
    return jnp.where(kept, scaled, jnp.zeros((), scaled.dtype)), kept
