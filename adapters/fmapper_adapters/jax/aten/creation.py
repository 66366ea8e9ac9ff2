"""New arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import cast, result_type


@lowering("aten::full")
def full(size: Sequence[Any], fill_value: Any, *, dtype: Any = None) -> jax.Array:
    """An array of one value."""
    dtype = result_type(fill_value) if dtype is None else dtype
    return jnp.broadcast_to(cast(fill_value, dtype), tuple(size))


@lowering("aten::scalar_tensor")
def scalar_tensor(value: Any, *, dtype: Any = None) -> jax.Array:
    """A number as an array; float unless a dtype is given."""
    return cast(value, result_type(1.0) if dtype is None else dtype)
