"""Products of matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import cast


def of_one_dtype(x: Any, *others: Any) -> tuple[Any, ...]:
    """Operands of a product in the dtype of the last one that is given.

    torch refuses mixed dtypes; they arise only where the arrays of a converted model were cast,
    and then the dtype of the weight is the one that was wanted.
    """
    dtype = next(y.dtype for y in reversed((x, *others)) if y is not None)
    return tuple(None if y is None else cast(y, dtype) for y in (x, *others))


@lowering("aten::linear")
def linear(x: Any, weight: Any, bias: Any = None) -> jax.Array:
    """`x @ weight.T + bias`, weight of shape (out, in) or (in,)."""
    x, weight = of_one_dtype(x, weight)
    dims = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    y = jax.lax.dot_general(x, weight, dims)
    return y if bias is None else y + cast(bias, y.dtype)


@lowering("aten::mm", "aten::bmm", "aten::matmul", "aten::mv", "aten::dot")
def matmul(x: Any, y: Any) -> jax.Array:
    """The product of matrices, in batches where there are more dimensions."""
    return jnp.matmul(*of_one_dtype(x, y))


@lowering("aten::addmm", "aten::baddbmm", "aten::addmv")
def addmm(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """`beta * bias + alpha * (x @ y)`; for `beta=0` NaN in the bias is ignored."""
    x, y = of_one_dtype(x, y)
    product = jnp.matmul(x, y)
    if alpha != 1:
        product = product * cast(alpha, product.dtype)
    if isinstance(beta, int | float) and beta == 0:
        return product
    bias = cast(bias, product.dtype)
    return product + (bias if beta == 1 else bias * cast(beta, product.dtype))
