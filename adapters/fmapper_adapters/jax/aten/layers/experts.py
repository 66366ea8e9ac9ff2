"""Products of groups of rows with one matrix per group, as in mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fmapper_adapters.jax.arrays.sharding import count_devices
from fmapper_adapters.jax.aten.matrices.linalg import of_one_dtype
from fmapper_adapters.jax.aten.table import dimensions, lowering
from fmapper_adapters.jax.aten.types import cast


@lowering("transformers::grouped_mm_fallback", dims=dimensions.group)
def grouped_mm_fallback(x: Any, weight: Any, offs: Any) -> jax.Array:
    """Multiplies rows up to `offs[0]` by `weight[0]`, those up to `offs[1]` by `weight[1]`, ...

    Args:
        x: Rows of shape (rows, in), sorted by group.
        weight: Of shape (groups, in, out).
        offs: Where each group ends, of shape (groups,). Rows behind the last end give zeros.
    """
    x, weight = of_one_dtype(x, whole_groups(weight))
    sizes = jnp.diff(offs, prepend=0).astype(jnp.int32)
    y = jax.lax.ragged_dot(x, weight, sizes)
    used = jnp.arange(x.shape[0]) < offs[-1]
    return jnp.where(used[:, None], y, jnp.zeros((), y.dtype))


def whole_groups(weight: Any) -> Any:
    """Returns the matrices of all groups, gathered on a mesh that divides the groups.

    XLA cannot divide a product by groups: it would send rows to and fro instead.
    """
    if count_devices([weight]) == 1:
        return weight
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(None, *[free] * (weight.ndim - 1))
    mesh = jax.typeof(weight).sharding.mesh
    return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, spec))


@lowering("aten::_grouped_mm", dims=dimensions.group)
def grouped_mm(
    x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> jax.Array:
    """Multiplies (rows, in) and (groups, in, out), or, without `offs`, batches of matrices.

    Raises:
        TypeError: The arrays have other dimensions.
    """
    if x.ndim == weight.ndim == 3:
        y = jnp.matmul(*of_one_dtype(x, weight))
    elif x.ndim == 2 and weight.ndim == 3 and offs is not None:
        y = grouped_mm_fallback(x, weight, offs)
    else:
        raise TypeError(f"_grouped_mm of {x.ndim} and {weight.ndim} dimensions is not lowered")
    if bias is not None:
        y = y + cast(bias, y.dtype)
    return y if out_dtype is None else cast(y, out_dtype)


@lowering("fmapper::in_blocks", whole=False)
def in_blocks(
    function: Callable[..., Any], divided: Sequence[Any], repeats: Sequence[int], others: Any
) -> jax.Array:
    """Computes the rows of each part of a batch separately, on a mesh of several devices.

    There are as many parts as devices, or fewer if that does not divide the rows: then each device
    has whole parts of its own rows, whichever axes of the mesh divide the batch, and XLA needs no
    rows of others.

    Args:
        function: Takes `divided`, as parts, and `others`; returns an array in parts with a row for
            each row of the first array.
        divided: Arrays with rows.
        repeats: For each array, the number of rows of the first array per row of it.
        others: Arguments that all parts take unchanged.
    """
    sizes = [x.shape[0] for x in divided]
    rows = {size * times for size, times in zip(sizes, repeats, strict=True)}
    is_fixed = all(isinstance(size, int) for size in sizes)
    parts = math.gcd(count_devices(divided), *sizes) if is_fixed and len(rows) == 1 else 1
    blocks = [x.reshape(parts, x.shape[0] // parts, *x.shape[1:]) for x in divided]
    y = function(*blocks, *others)
    return y.reshape(parts * y.shape[1], *y.shape[2:])


@lowering("fmapper::in_each_block", whole=False)
def in_each_block(function: Callable[..., Any], blocks: Sequence[Any], others: Any) -> Any:
    """Calls a function for each part, with `blocks[i][part]` for all i, and with `others`."""
    return jax.vmap(lambda *parts: function(*parts, *others))(*blocks)


@lowering("fmapper::grouped_mm_in_blocks", whole=False)
def grouped_mm_in_blocks(x: Any, weight: Any, ends: Any) -> jax.Array:
    """Multiplies groups of rows in each part; all parts share the weights.

    `jax.vmap` of `jax.lax.ragged_dot` would ask for weights of each part.

    Args:
        x: Rows of shape (parts, rows, in), sorted by group in each part.
        weight: Of shape (groups, in, out).
        ends: Where each group ends in each part, of shape (parts, groups).
    """
    x, weight = of_one_dtype(x, whole_groups(weight))
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((2,), (1,)), ((), ())),
        lhs_ragged_dimensions=[1],
        rhs_group_dimensions=[0],
    )
    y = jax.lax.ragged_dot_general(x, weight, sizes, dims)
    used = jnp.arange(x.shape[1]) < ends[:, -1:]
    return jnp.where(used[..., None], y, jnp.zeros((), y.dtype))


@lowering("fmapper::invert_order", whole=False, int64="moves")
def invert_order(order: Any) -> jax.Array:
    """Returns the position of each index in a permutation."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
