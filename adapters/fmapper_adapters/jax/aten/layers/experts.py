"""Products of groups of rows with one matrix per group, as in mixtures of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.matrices.linalg import of_one_dtype
from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import cast


@lowering("transformers::grouped_mm_fallback")
def grouped_mm_fallback(x: Any, weight: Any, offs: Any) -> jax.Array:
    """Multiplies rows up to `offs[0]` by `weight[0]`, those up to `offs[1]` by `weight[1]`, ...

    Args:
        x: Rows of shape (rows, in), sorted by group.
        weight: Of shape (groups, in, out).
        offs: Where each group ends, of shape (groups,). Rows behind the last end give zeros.
    """
    x, weight = of_one_dtype(x, weight)
    sizes = jnp.diff(offs, prepend=0).astype(jnp.int32)
    y = jax.lax.ragged_dot(x, weight, sizes)
    used = jnp.arange(x.shape[0]) < offs[-1]
    return jnp.where(used[:, None], y, jnp.zeros((), y.dtype))


@lowering("aten::_grouped_mm")
def grouped_mm(
    x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> jax.Array:
    """Multiplies groups: (rows, in) and (groups, in, out), or batches of both without ends.

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
