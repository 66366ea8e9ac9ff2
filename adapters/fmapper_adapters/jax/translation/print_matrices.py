"""Products of matrices, and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmapper.translation import Printing, Value, expr
from fmapper_adapters.jax.translation.promotion import (
    call_of,
    convert,
    is_float,
    is_number,
    number,
    promote,
)
from fmapper_adapters.jax.translation.subscripts import swap
from fmapper_adapters.jax.translation.table import prints


@prints("aten::linear")
def linear(p: Printing, x: Value, weight: Value, bias: Value | None = None) -> Any:
    """Prints `x @ weight.T + bias`."""
    x = convert(x, weight.dtype)
    product = expr("{0} @ {1}", x, swap(weight) if weight.ndim == 2 else weight)
    return product if bias is None else expr("{0} + {1}", product, convert(bias, weight.dtype))


@prints("aten::mm", "aten::bmm", "aten::matmul", "aten::mv", "aten::dot")
def matmul(p: Printing, x: Value, y: Value) -> Any:
    """Prints `x @ y`."""
    return None if p.dtype == "bool" else expr("{0} @ {1}", convert(x, y.dtype), y)


@prints("aten::addmm", "aten::baddbmm", "aten::addmv")
def addmm(p: Printing, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Prints `bias + x @ y`."""
    if p.dtype == "bool" or not (is_float(p.dtype) or _whole(alpha, beta)):
        return None
    product = matmul(p, x, y)
    if not is_number(alpha, 1):
        product = expr("{0} * ({1})", number(alpha), product)
    if is_number(beta, 0):
        return product
    bias = convert(bias, p.dtype)
    template = "{0} + {1}" if is_number(beta, 1) else f"{beta!r} * {{0}} + {{1}}"
    return expr(template, bias, product)


def _whole(*numbers: Any) -> bool:
    return all(isinstance(n, int) for n in numbers)


@prints("aten::outer")
def outer(p: Printing, x: Value, y: Value) -> Any:
    """Prints `jnp.outer(x, y)`."""
    taken = promote([x, y])
    return None if taken is None or p.dtype == "bool" else expr("jnp.outer({0}, {1})", *taken)


@prints("aten::einsum")
def einsum(p: Printing, equation: str, operands: Sequence[Value], *, path: Any = None) -> Any:
    """Prints `jnp.einsum(equation, ...)`."""
    is_known = is_float(p.dtype) or p.dtype.startswith("complex")
    if len({x.dtype for x in operands}) > 1 or not is_known:
        return None
    return call_of("jnp.einsum", equation, *operands)


@prints("aten::bilinear")
def bilinear(p: Printing, x: Value, y: Value, weight: Value, bias: Value | None = None) -> Any:
    """Prints `jnp.einsum("...i,oij,...j->...o", x, weight, y) + bias`."""
    if len({one.dtype for one in (x, y, weight, bias) if one is not None}) > 1:
        return None
    product = call_of("jnp.einsum", "...i,oij,...j->...o", x, weight, y)
    return product if bias is None else expr("{0} + {1}", product, bias)


@prints("aten::scaled_dot_product_attention")
def attention(
    p: Printing,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """Prints `attention(query, key, value, ...)`, a function in the file."""
    if not is_float(query.dtype) or enable_gqa:
        return None
    features = query.shape[-1]
    if isinstance(features, int) and features and scale == features**-0.5:
        scale = None  # the default
    return call_of(
        "attention",
        query,
        key,
        value,
        mask=attn_mask,
        is_causal=True if is_causal else None,
        scale=scale,
    )
