"""Views and shapes: the same elements, seen otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import promote


@lowering("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::_reshape_copy")
def view(x: Any, size: Any) -> jax.Array:
    """The elements row by row in another shape; one size may be -1. Or, for a dtype, their bits."""
    if not isinstance(size, tuple):
        return jax.lax.bitcast_convert_type(x, size)
    return x.reshape(_known_sizes(x, size))


def _known_sizes(x: Any, size: Sequence[Any]) -> tuple[Any, ...]:
    """The sizes with -1 worked out; JAX does it too, but not where another one is zero."""
    known = [s for s in size if not (isinstance(s, int) and s == -1)]
    if len(known) == len(size):
        return tuple(size)
    count = math.prod(known)
    missing = math.prod(x.shape) // count if not (isinstance(count, int) and count == 0) else 0
    return tuple(missing if isinstance(s, int) and s == -1 else s for s in size)


@lowering("aten::permute")
def permute(x: Any, dims: Sequence[int]) -> jax.Array:
    """The dimensions in another order."""
    return jnp.transpose(x, dims)


@lowering("aten::transpose")
def transpose(x: Any, dim0: int, dim1: int) -> jax.Array:
    """Two dimensions swapped."""
    return x if x.ndim == 0 else jnp.swapaxes(x, dim0, dim1)


@lowering("aten::t")
def t(x: Any) -> jax.Array:
    """A matrix transposed."""
    return x.T


@lowering("aten::unsqueeze")
def unsqueeze(x: Any, dim: int) -> jax.Array:
    """A dimension of size one more."""
    return jnp.expand_dims(x, dim)


@lowering("aten::squeeze")
def squeeze(x: Any, dim: Any = None) -> jax.Array:
    """Without dimensions of size one: all of them, or those among `dim`."""
    if dim is None:
        dims = list(range(x.ndim))
    else:
        dims = [d % max(x.ndim, 1) for d in (dim if isinstance(dim, tuple) else (dim,))]
    gone = tuple(d for d in dims if d < x.ndim and isinstance(x.shape[d], int) and x.shape[d] == 1)
    return jnp.squeeze(x, gone)


@lowering("aten::expand")
def expand(x: Any, size: Sequence[Any], *, implicit: bool = False) -> jax.Array:
    """Broadcast to a size, where -1 keeps what is there."""
    front = len(size) - x.ndim
    shape = tuple(
        x.shape[i - front] if isinstance(s, int) and s == -1 else s for i, s in enumerate(size)
    )
    return jnp.broadcast_to(x, shape)


@lowering("aten::cat")
def cat(arrays: Sequence[Any], dim: int = 0) -> jax.Array:
    """Arrays one after the other; those of shape (0,) are left out, as in torch."""
    arrays = promote(*arrays)
    kept = [a for a in arrays if a.shape != (0,)] or arrays[:1]
    return jnp.concatenate(kept, dim)
