"""Activation functions."""

from __future__ import annotations

from typing import Any

from fmapper.translation import Printing, Value, expr
from fmapper_adapters.jax.translation.promotion import (
    convert,
    is_float,
    is_half,
    is_number,
    method,
    number,
)
from fmapper_adapters.jax.translation.promotion import widen as wide
from fmapper_adapters.jax.translation.table import prints

_PLAIN = {
    "aten::relu": "jax.nn.relu({0})",
    "aten::relu6": "jax.nn.relu6({0})",
    "aten::silu": "jax.nn.silu({0})",
    "aten::selu": "jax.nn.selu({0})",
    "aten::mish": "jax.nn.mish({0})",
    "aten::hardswish": "jax.nn.hard_swish({0})",
    "aten::hardsigmoid": "jax.nn.hard_sigmoid({0})",
    "aten::log_sigmoid": "jax.nn.log_sigmoid({0})",
}


def _enter_plain(op: str, template: str) -> None:
    @prints(op)
    def printer(p: Printing, x: Value) -> Any:
        if not is_float(x.dtype):
            return expr(template, x) if op == "aten::relu" and x.dtype != "bool" else None
        return expr(template, x)


for _op, _template in _PLAIN.items():
    _enter_plain(_op, _template)


@prints("aten::gelu")
def gelu(p: Printing, x: Value, *, approximate: str = "none") -> Any:
    """Prints `gelu(x)`, a function in the file, or `jax.nn.gelu(x, approximate=...)`."""
    if x.dtype == "float32" and approximate == "none":
        return expr("gelu({0})", x)
    return expr("jax.nn.gelu({0}, approximate={1})", x, approximate == "tanh")


@prints("aten::prelu")
def prelu(p: Printing, x: Value, weight: Value) -> Any:
    """Prints `prelu(x, weight)`, a function in the file; one weight for each channel or for all."""
    if not is_float(x.dtype) or x.dtype != weight.dtype:
        return None
    each = x.ndim > 2 and weight.shape != (1,)
    shape = (-1, *(1,) * (x.ndim - 2))
    return expr("prelu({0}, {1})", x, method(weight, "reshape", *shape) if each else weight)


@prints("aten::elu")
def elu(p: Printing, x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    """Prints `jax.nn.elu(x, alpha)`."""
    if not is_number(scale, 1) or not is_number(input_scale, 1) or not is_float(x.dtype):
        return None
    if is_number(alpha, 1):
        return expr("jax.nn.elu({0})", x)
    return expr("jax.nn.elu({0}, alpha={1})", x, alpha)


@prints("aten::celu")
def celu(p: Printing, x: Value, alpha: Any = 1.0) -> Any:
    """Prints `jax.nn.celu(x, alpha)`."""
    return expr("jax.nn.celu({0}, alpha={1})", x, alpha) if is_float(x.dtype) else None


@prints("aten::leaky_relu")
def leaky_relu(p: Printing, x: Value, negative_slope: Any = 0.01) -> Any:
    """Prints `jax.nn.leaky_relu(x, negative_slope)`."""
    if not is_float(x.dtype):
        return None
    if negative_slope == 0.01:  # which is JAX's own, too
        return expr("jax.nn.leaky_relu({0})", x)
    return expr("jax.nn.leaky_relu({0}, negative_slope={1})", x, negative_slope)


@prints("aten::softplus")
def softplus(p: Printing, x: Value, beta: Any = 1, threshold: Any = 20) -> Any:
    """Prints `jax.nn.softplus(x)`: past the threshold of 20 it is x, to within rounding."""
    if not is_float(x.dtype) or not is_number(threshold, 20) or not is_number(beta, 1):
        return None
    return expr("jax.nn.softplus({0})", x)


@prints("aten::hardtanh")
def hardtanh(p: Printing, x: Value, min_val: Any = -1, max_val: Any = 1) -> Any:
    """Prints `jnp.clip(x, low, high)`, or `jax.nn.relu6(x)`."""
    if not is_float(x.dtype):
        return None
    if is_number(min_val, 0) and is_number(max_val, 6):
        return expr("jax.nn.relu6({0})", x)
    return expr("jnp.clip({0}, {1}, {2})", x, number(min_val), number(max_val))


@prints("aten::glu")
def glu(p: Printing, x: Value, dim: int = -1) -> Any:
    """Prints `jax.nn.glu(x, axis)`."""
    return expr("jax.nn.glu({0}, axis={1})", x, dim) if is_float(x.dtype) else None


@prints("aten::threshold")
def threshold(p: Printing, x: Value, threshold: Any, value: Any) -> Any:
    """Prints `jax.nn.relu(x)` where it is that."""
    plain = is_number(threshold, 0) and is_number(value, 0) and is_float(x.dtype)
    return expr("jax.nn.relu({0})", x) if plain else None


@prints("aten::softmax", "aten::_softmax")
def softmax(
    p: Printing, x: Value, dim: int, half_to_float: Any = False, *, dtype: Any = None
) -> Any:
    """Prints `jax.nn.softmax(x, axis=dim)`, of halves in float32."""
    return _softmax(p, x, dim, "jax.nn.softmax({0}, axis={1})")


@prints("aten::log_softmax", "aten::_log_softmax")
def log_softmax(
    p: Printing, x: Value, dim: int, half_to_float: Any = False, *, dtype: Any = None
) -> Any:
    """Prints `jax.nn.log_softmax(x, axis=dim)`, of halves in float32."""
    return _softmax(p, x, dim, "jax.nn.log_softmax({0}, axis={1})")


def _softmax(p: Printing, x: Value, dim: int, template: str) -> Any:
    if not x.ndim or not is_float(p.dtype) or 0 in x.shape:
        return None
    inner = "float32" if is_half(p.dtype) else p.dtype
    node = expr(template, convert(x, inner), dim)
    return convert(node, p.dtype) if is_half(p.dtype) else node


@prints("aten::logsumexp")
def logsumexp(p: Printing, x: Value, dim: Any, keepdim: bool = False) -> Any:
    """Prints `jax.nn.logsumexp(x, axis=dim)`, of halves in float32."""
    if not x.ndim or not is_float(x.dtype):
        return None
    axis = dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
    if axis == ():
        return None
    more = ", keepdims=True" if keepdim else ""
    node = expr(f"jax.nn.logsumexp({{0}}, axis={{1}}{more})", wide(x), axis)
    return convert(node, p.dtype) if is_half(x.dtype) else node
