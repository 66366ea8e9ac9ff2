"""Operations of jax.experimental.sparse in terms of operations on dense arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def on_dense_arrays(eqn: Any) -> Any | None:
    """Rewrites an operation on BCOO or BCSR matrices; None for anything else.

    No matrix is made dense: unspecified elements do not take part in products, as in JAX, where
        infinity times such an element is zero.
    """
    name = eqn.primitive.name
    if not name.startswith(("bcoo_", "bcsr_")):
        return None
    products = {"bcoo_dot_general": _bcoo_product, "bcsr_dot_general": _bcsr_product}
    run = partial(products.get(name, eqn.primitive.impl), **eqn.params)
    struct: Any = jax.ShapeDtypeStruct
    return jax.make_jaxpr(run)(*[struct(v.aval.shape, v.aval.dtype) for v in eqn.invars])


def _bcsr_product(
    data: Any, indices: Any, starts: Any, rhs: Any, *, lhs_spinfo: Any, **params: Any
) -> Any:
    from jax.experimental import sparse

    matrix = sparse.BCSR((data, indices, starts), shape=lhs_spinfo.shape).to_bcoo()
    return _bcoo_product(matrix.data, matrix.indices, rhs, lhs_spinfo=lhs_spinfo, **params)


def _bcoo_product(
    data: Any,
    indices: Any,
    rhs: Any,
    *,
    dimension_numbers: Any,
    preferred_element_type: Any,
    lhs_spinfo: Any,
) -> Any:
    """Multiplies the specified elements with their rows of `rhs`, and sums by position."""
    (left_summed, right_summed), (left_batch, right_batch) = dimension_numbers
    shape, batch = lhs_spinfo.shape, indices.ndim - 2
    # Each dimension has a number: those of the left operand, then the free ones of the right one.
    left = list(range(len(shape)))
    right = [len(shape) + d for d in range(rhs.ndim)]
    for left_dim, other in zip(
        (*left_summed, *left_batch), (*right_summed, *right_batch), strict=True
    ):
        right[other] = left_dim
    dtype = preferred_element_type or jnp.result_type(data, rhs)
    data = jnp.broadcast_to(data.astype(dtype), (*shape[:batch], *data.shape[batch:]))
    indices = jnp.broadcast_to(indices, (*shape[:batch], *indices.shape[batch:]))
    product, numbers = _sum_dims(
        (data, indices, rhs.astype(dtype)), shape, left, right, set(left_summed)
    )
    free = [d for d in left if d not in left_summed and d not in left_batch]
    order = [*left_batch, *free, *(d for d in right if d >= len(shape))]
    return jnp.transpose(product, [numbers.index(d) for d in order])


def _sum_dims(
    arrays: tuple[Any, Any, Any],
    shape: tuple[int, ...],
    left: list[int],
    right: list[int],
    summed: set[int],
) -> tuple[Any, list[int]]:
    """Returns the product, and the numbers of its dimensions in order."""
    data, indices, rhs = arrays
    if indices.ndim == 2:
        return _of_one(data, indices, rhs, shape, left, right)
    first = left[0]
    numbers: list[int] = []
    axis = right.index(first) if first in right else None
    inner = [d for d in right if d != first]

    def row(*arrays: Any) -> Any:
        product, below = _sum_dims(arrays, shape, left[1:], inner, summed)
        numbers[:] = below
        return product

    product = jax.vmap(row, in_axes=(0, 0, axis))(data, indices, rhs)
    return (product.sum(0), numbers) if first in summed else (product, [first, *numbers])


def _of_one(
    data: Any, indices: Any, rhs: Any, shape: tuple[int, ...], left: list[int], right: list[int]
) -> tuple[Any, list[int]]:
    count = indices.shape[-1]
    sparse, dense = left[:count], left[count:]
    met = [d for d in sparse if d in right]
    kept = [d for d in sparse if d not in right]
    rest = [d for d in right if d not in met]
    rhs = jnp.transpose(rhs, [right.index(d) for d in (*met, *rest)])
    places = {d: indices[:, i] for i, d in enumerate(sparse)}
    at = tuple(places[d] for d in met)
    rhs = rhs.at[at].get(mode="fill", fill_value=0) if met else rhs[None]
    parts = data.reshape(*data.shape, *(1,) * len(rest)) * jnp.expand_dims(
        rhs, tuple(range(1, 1 + len(dense)))
    )
    if not kept:
        return parts.sum(0), [*dense, *rest]
    blank = jnp.zeros((*(shape[d] for d in kept), *parts.shape[1:]), parts.dtype)
    return blank.at[tuple(places[d] for d in kept)].add(parts), [*kept, *dense, *rest]
