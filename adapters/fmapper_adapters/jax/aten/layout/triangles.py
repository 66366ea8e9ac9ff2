"""Triangles of matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import lowering


@lowering("aten::tril", int64="moves")
def tril(x: Any, diagonal: int = 0) -> jax.Array:
    """Returns matrices with zeros above a diagonal, whatever was there."""
    return _keep_where(x, lambda row, column: column - row <= diagonal)


@lowering("aten::triu", int64="moves")
def triu(x: Any, diagonal: int = 0) -> jax.Array:
    """Returns matrices with zeros below a diagonal, whatever was there."""
    return _keep_where(x, lambda row, column: column - row >= diagonal)


def _keep_where(x: Any, where: Any) -> jax.Array:
    rows = jax.lax.broadcasted_iota("int32", x.shape[-2:], 0)
    columns = jax.lax.broadcasted_iota("int32", x.shape[-2:], 1)
    return jnp.where(where(rows, columns), x, jnp.zeros((), x.dtype))
