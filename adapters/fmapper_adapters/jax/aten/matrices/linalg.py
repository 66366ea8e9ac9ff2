"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import dimensions, lowering
from fmapper_adapters.jax.aten.types import cast, category, dtype_of, promote, promote_arrays, wide


def of_one_dtype(x: Any, *others: Any) -> tuple[Any, ...]:
    """Returns operands of a product in the dtype of the last operand that is not None.

    torch refuses mixed dtypes. They occur only if the arrays of a converted model were cast, and
    then the dtype of the weight is the intended one.
    """
    dtype = next(y.dtype for y in reversed((x, *others)) if y is not None)
    return tuple(None if y is None else cast(y, dtype) for y in (x, *others))


@lowering("aten::linear", dims=dimensions.linear)
def linear(x: Any, weight: Any, bias: Any = None) -> jax.Array:
    """Computes `x @ weight.T + bias`, weight of shape (out, in) or (in,)."""
    x, weight = of_one_dtype(x, weight)
    dims = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    y = jax.lax.dot_general(x, weight, dims)
    return y if bias is None else y + cast(bias, y.dtype)


@lowering("aten::mm", "aten::bmm", "aten::matmul", dims=dimensions.matmul)
@lowering("aten::mv", "aten::dot", whole=False, dims=dimensions.matmul)
def matmul(x: Any, y: Any) -> jax.Array:
    """Returns the product of matrices, batched over further dimensions."""
    return jnp.matmul(*of_one_dtype(x, y))


@lowering("aten::_int_mm")
def int_mm(x: Any, y: Any) -> jax.Array:
    """Returns the product of matrices of int8, summed in int32."""
    return jnp.matmul(x, y, preferred_element_type=jnp.int32)


@lowering("aten::vdot", whole=False)
def vdot(x: Any, y: Any) -> jax.Array:
    """Returns the sum of products with the conjugate of the first."""
    return jnp.vdot(*of_one_dtype(x, y))


@lowering("aten::linalg_vecdot", whole=False)
def vecdot(x: Any, y: Any, *, dim: int = -1) -> jax.Array:
    """Returns the sums of products with the conjugate of the first, along a dimension."""
    x, y = jnp.broadcast_arrays(*of_one_dtype(x, y))
    return jnp.vecdot(x, y, axis=dim)


@lowering("aten::outer", whole=False)
def outer(x: Any, y: Any) -> jax.Array:
    """Returns all products of two vectors."""
    x, y = promote(x, y)
    return x[:, None] & y if x.dtype == bool else x[:, None] * y


@lowering("aten::addmm", "aten::baddbmm", "aten::addmv", dims=dimensions.addmm)
def addmm(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """Computes `beta * bias + alpha * (x @ y)`; for `beta=0` NaN in the bias is ignored."""
    return _blend(bias, matmul(x, y), beta, alpha)


@lowering("aten::addbmm")
def addbmm(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """Computes `beta * bias + alpha * (the sum of x[i] @ y[i])`."""
    return _blend(bias, jnp.einsum("bij,bjk->ik", *of_one_dtype(x, y)), beta, alpha)


@lowering("aten::addr")
def addr(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """Computes `beta * bias + alpha * (all products of x and y)`."""
    bias, x, y = promote(bias, x, y)
    if bias.dtype == bool:
        product = x[:, None] & y & bool(alpha)
        return jnp.broadcast_to(product | (bias & bool(beta)), product.shape)
    return _blend(bias, x[:, None] * y, beta, alpha)


def _blend(bias: Any, product: Any, beta: Any, alpha: Any) -> jax.Array:
    """Scales and adds, for halves in float32, and rounds once."""
    dtype = product.dtype
    if _is_one(alpha) and _is_one(beta):
        return product + cast(bias, dtype)
    product = product.astype(wide(dtype))
    if not _is_one(alpha):
        product = product * cast(alpha, product.dtype)
    if isinstance(beta, int | float | complex) and beta == 0:
        return product.astype(dtype)
    bias = cast(bias, product.dtype)
    return (product + (bias if _is_one(beta) else bias * cast(beta, bias.dtype))).astype(dtype)


def _is_one(x: Any) -> bool:
    return isinstance(x, int | float | complex) and x == 1


@lowering("aten::einsum")
def einsum(equation: str, operands: Sequence[Any], *, path: Any = None) -> jax.Array:
    """Returns sums of products over named dimensions.

    If a product of matrices has no dimension left to sum over, torch multiplies element by element,
    and promotes dtypes differently.
    """
    if len(operands) == 2 and (alone := _find_lone_sums(equation, *operands)) is not None:
        widened = [
            cast(x, dtype_of("int64")) if summed and category(x.dtype) in ("bool", "int") else x
            for x, summed in zip(operands, alone, strict=True)
        ]
        operands = promote_arrays(*widened)
    else:
        operands = of_one_dtype(*operands)
    if path is None:
        return jnp.einsum(equation, *operands, optimize="optimal" if len(operands) < 6 else "auto")
    pairs: list[tuple[int, ...]] = [(path[i], path[i + 1]) for i in range(0, len(path), 2)]
    return jnp.einsum(equation, *operands, optimize=pairs)


def _find_lone_sums(equation: str, x: Any, y: Any) -> tuple[bool, bool] | None:
    """Returns the operands with dimensions to sum before the product; None if others remain."""
    terms, arrow, output = equation.replace(" ", "").partition("->")
    pair = terms.split(",")
    sizes = [_sizes(term, operand.shape) for term, operand in zip(pair, (x, y), strict=True)]
    kept = set(output) if arrow else {c for c in terms if terms.count(c) == 1}
    alone = [False, False]
    for label in {*sizes[0], *sizes[1]} - kept:
        long = [by_label.get(label, 1) != 1 for by_label in sizes]
        if all(long):
            return None
        alone = [a or b for a, b in zip(alone, long, strict=True)]
    return alone[0], alone[1]


def _sizes(term: str, shape: Sequence[int]) -> dict[str, int]:
    """Returns the sizes of the dimensions that have a name."""
    before, _, after = term.partition("...")
    last = dict(zip(reversed(after), reversed(shape), strict=False))
    return {**dict(zip(before, shape, strict=False)), **last}


@lowering("aten::bilinear")
def bilinear(x: Any, y: Any, weight: Any, bias: Any = None) -> jax.Array:
    """Computes `x @ weight[o] @ y` for each output o."""
    x, y, weight = of_one_dtype(x, y, weight)
    z = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return z if bias is None else z + cast(bias, z.dtype)


@lowering("aten::_trilinear")
def trilinear(
    a: Any,
    b: Any,
    c: Any,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> jax.Array:
    """Returns the sum over dimensions of three arrays' product, each with dimensions added."""
    a, b, c = (
        jnp.expand_dims(x, tuple(dims)) if dims else x
        for x, dims in zip((a, b, c), (expand1, expand2, expand3), strict=True)
    )
    names = "abcdefghijklmnopqrstuvwxyz"[: a.ndim]
    shape = jnp.broadcast_shapes(a.shape, b.shape, c.shape)
    kept = "".join(n for i, n in enumerate(names) if i not in [d % a.ndim for d in sumdim])
    a, b, c = (jnp.broadcast_to(x, shape) for x in (a, b, c))
    return jnp.einsum(f"{names},{names},{names}->{kept}", a, b, c)


@lowering("aten::kron")
def kron(x: Any, y: Any) -> jax.Array:
    """Returns the Kronecker product."""
    x, y = promote_arrays(x, y)
    if x.dtype == bool:  # JAX does not multiply bools
        return jnp.kron(x.astype("int8"), y.astype("int8")).astype(bool)
    return jnp.kron(x, y)


@lowering("aten::linalg_cross")
def cross(x: Any, y: Any, *, dim: int = -1) -> jax.Array:
    """Returns the cross product along a dimension of size three."""
    x, y = jnp.broadcast_arrays(*promote(x, y))
    (a, b, c), (d, e, f) = jnp.moveaxis(x, dim, 0), jnp.moveaxis(y, dim, 0)
    return jnp.stack([b * f - c * e, c * d - a * f, a * e - b * d], dim)


@lowering("aten::trace")
def trace(x: Any) -> jax.Array:
    """Returns the sum of the diagonal; integers and bool give int64."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else dtype_of("int64")
    diagonal = jnp.diagonal(x).astype(wide(dtype))
    return jnp.sum(diagonal).astype(dtype)
