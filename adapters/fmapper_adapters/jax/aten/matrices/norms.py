"""Norms, and distances between vectors."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.extremes import largest, smallest
from fmapper_adapters.jax.aten.pointwise.elementwise import absolute
from fmapper_adapters.jax.aten.table import lowering, reduces
from fmapper_adapters.jax.aten.types import cast, promote, wide


def _axes(x: Any, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(x.ndim))
    return tuple(d % x.ndim for d in (dim if isinstance(dim, tuple) else (dim,))) if x.ndim else ()


@lowering("aten::linalg_vector_norm", dims=reduces("dim", 2))
def vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    """Returns the norm over dimensions; the gradient of zero is zero. Halves in float32."""
    x = x if dtype is None else cast(x, dtype)
    y = absolute(x)
    return p_norm(y.astype(wide(y.dtype)), ord, _axes(x, dim), keepdim).astype(y.dtype)


@lowering("aten::norm", dims=reduces("dim", 2))
def norm(
    x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    """Computes `vector_norm`; p=None stands for 2."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def p_norm(y: Any, p: Any, dims: tuple[int, ...], keepdim: bool = False) -> jax.Array:
    """Returns the p-norm of numbers that are not negative, over dimensions."""
    zero = jnp.zeros((), y.dtype)
    if p == 0:
        return jnp.sum((y != 0).astype(y.dtype), dims, keepdims=keepdim)
    if p == 1:
        return jnp.sum(y, dims, keepdims=keepdim)
    if math.isinf(p):
        if p > 0 and 0 in y.shape:  # it is zero, of no elements
            return jnp.max(y, dims, keepdims=keepdim, initial=0)
        return (largest if p > 0 else smallest)(y, dims, keepdim)
    if p == 2:
        total = jnp.sum(y * y, dims, keepdims=keepdim)
        return jnp.where(total == 0, zero, jnp.sqrt(jnp.where(total == 0, 1, total)))
    none = y == 0
    powers = jnp.where(none, zero if p > 0 else jnp.inf, jnp.where(none, 1, y) ** p)
    total = jnp.sum(powers, dims, keepdims=keepdim)
    unusual = (total == 0) | jnp.isinf(total)
    roots = jnp.where(unusual, 1, total) ** (1 / p)
    at_ends = jnp.where((total == 0) == (p > 0), zero, jnp.inf)
    return jnp.where(unusual, at_ends, roots)


@lowering("aten::dist")
def dist(x: Any, y: Any, p: Any = 2) -> jax.Array:
    """Returns the norm of the difference of two arrays."""
    x, y = promote(x, y)
    return vector_norm(x - y, p)


@lowering("aten::cdist", "aten::_cdist_forward")
def cdist(x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> jax.Array:
    """Returns distances between all rows of x and of y; at distance zero the gradient is zero.

    As in torch, for p=2 and more than 25 rows (`compute_mode` 1: always, 2: never) they come from
    a matrix product.
    """
    many = x.shape[-2] > 25 or y.shape[-2] > 25
    if p == 2 and (compute_mode == 1 or (compute_mode in (None, 0) and many)):
        return _euclidean(x, y)
    return p_norm(absolute(x[..., :, None, :] - y[..., None, :, :]), p, (-1,))


def _euclidean(x: Any, y: Any) -> jax.Array:
    # The squares are part of the product, as in torch, so that cancellation is the same.
    x2, y2 = (jnp.sum(a * a, -1, keepdims=True) for a in (x, y))
    left = jnp.concatenate([-2 * x, x2, jnp.ones_like(x2)], -1)
    right = jnp.concatenate([y, jnp.ones_like(y2), y2], -1)
    squares = jnp.matmul(left, jnp.swapaxes(right, -1, -2))
    zero = squares <= 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, squares)))


@lowering("aten::_pdist_forward")
def pdist(x: Any, p: float = 2.0) -> jax.Array:
    """Returns distances between each row and the rows after it."""
    rows, columns = jnp.triu_indices(x.shape[0], 1)
    return p_norm(absolute(x[rows] - x[columns]), p, (-1,))
