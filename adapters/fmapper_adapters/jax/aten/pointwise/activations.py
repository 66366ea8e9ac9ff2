"""Activation functions other than the plain elementwise ones.

They are written with `where`, not with minimum and maximum: at a bound torch's gradient is zero,
and theirs would be one half. Halves are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import along, lowering, pointwise
from fmapper_adapters.jax.aten.types import is_floating, wide


def _activation(*ops: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function whose first argument is widened, and whose result is cast back."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(x: Any, *args: Any, **kwargs: Any) -> jax.Array:
            y = x.astype(wide(x.dtype)) if is_floating(x) else x
            return function(y, *args, **kwargs).astype(x.dtype)

        lowering(*ops, dims=pointwise)(wrapper)
        return function

    return add


@_activation("aten::elu")
def elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> jax.Array:
    """Computes `scale * x` above zero, `scale * alpha * (exp(input_scale * x) - 1)` below."""
    below = _expm1(jnp.where(x > 0, 0, x) * input_scale) * (alpha * scale)
    return jnp.where(x > 0, x * scale, below)


@jax.custom_jvp
def _expm1(x: Any) -> jax.Array:
    """Computes `jnp.expm1` with the derivative exp(x): JAX's, the value plus one, cancels."""
    return jnp.expm1(x)


_expm1.defjvps(lambda slope, value, x: slope * jnp.exp(x))


@_activation("aten::celu")
def celu(x: Any, alpha: Any = 1.0) -> jax.Array:
    """Computes elu with a continuous derivative for every alpha."""
    return elu(x, alpha, 1.0, 1.0 / alpha)


@_activation("aten::selu")
def selu(x: Any) -> jax.Array:
    """Returns the elu that keeps means and variances."""
    return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@_activation("aten::mish")
def mish(x: Any) -> jax.Array:
    """Computes `x * tanh(softplus(x))`."""
    return x * jnp.tanh(softplus(x))


@_activation("aten::hardswish")
def hardswish(x: Any) -> jax.Array:
    """Computes `x * (x + 3) / 6` between -3 and 3, zero below and x above."""
    return jnp.where(x >= 3, x, jnp.where(x <= -3, x * 0, x * ((x + 3) / 6)))


@_activation("aten::hardsigmoid")
def hardsigmoid(x: Any) -> jax.Array:
    """Computes `(x + 3) / 6` between -3 and 3, zero below and one above."""
    one, zero = jnp.ones((), x.dtype), jnp.zeros((), x.dtype)
    return jnp.where(x >= 3, one, jnp.where(x <= -3, zero, (x + 3) / 6))


@_activation("aten::hardtanh")
def hardtanh(x: Any, min_val: Any = -1, max_val: Any = 1) -> jax.Array:
    """Clamps to the bounds; x at a bound keeps its sign, as -0.0, and has no gradient."""
    low, high = jnp.asarray(min_val, x.dtype), jnp.asarray(max_val, x.dtype)
    fixed = jax.lax.stop_gradient(x)
    bounded = jnp.where(x < low, low, jnp.where(x > high, high, fixed))
    return jnp.where((x <= low) | (x >= high), bounded, x)


@_activation("aten::relu6")
def relu6(x: Any) -> jax.Array:
    """Clamps to between zero and six."""
    return hardtanh(x, 0, 6)


@_activation("aten::leaky_relu")
def leaky_relu(x: Any, negative_slope: Any = 0.01) -> jax.Array:
    """Computes `negative_slope * x` where x is not above zero."""
    return jnp.where(x > 0, x, x * negative_slope)


@_activation("aten::softplus")
def softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> jax.Array:
    """Computes `log(1 + exp(beta * x)) / beta`, and x where `beta * x` is above the threshold."""
    linear = x * beta > threshold
    return jnp.where(linear, x, jnp.log1p(jnp.exp(jnp.where(linear, 0, x) * beta)) / beta)


@_activation("aten::softshrink")
def softshrink(x: Any, lambd: Any = 0.5) -> jax.Array:
    """Moves x nearer to zero by lambd; NaN stays."""
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


@_activation("aten::hardshrink")
def hardshrink(x: Any, lambd: Any = 0.5) -> jax.Array:
    """Returns zero within lambd of zero, else x."""
    inside = (x >= -lambd) & (x <= lambd)
    return jnp.where(inside, jnp.zeros((), x.dtype), x)


@_activation("aten::log_sigmoid")
def log_sigmoid(x: Any) -> jax.Array:
    """Computes `-log(1 + exp(-x))`."""
    return jax.nn.log_sigmoid(x)


@lowering("aten::log_sigmoid_forward")
def log_sigmoid_forward(x: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the logarithm, and a buffer that the CPU's backward reads."""
    y = x.astype(wide(x.dtype))
    return log_sigmoid(y).astype(x.dtype), jnp.exp(-jnp.abs(y)).astype(x.dtype)


@_activation("aten::threshold")
def threshold(x: Any, threshold: Any, value: Any) -> jax.Array:
    """Returns a value where x is not above the threshold; NaN stays."""
    return jnp.where(x <= threshold, jnp.asarray(value, x.dtype), x)


@lowering("aten::prelu")
def prelu(x: Any, weight: Any) -> jax.Array:
    """Computes `weight * x` where x is not above zero, one weight per channel or one for all."""
    if weight.size != 1 and x.ndim > 1:
        weight = weight.reshape(1, -1, *(1,) * (x.ndim - 2))
    elif weight.size == 1:
        weight = weight.reshape(())
    return prelu_kernel(x, weight)


@lowering("aten::_prelu_kernel", whole=False)
def prelu_kernel(x: Any, weight: Any) -> jax.Array:
    """Computes prelu with weights that broadcast already."""
    return jnp.where(x > 0, x, (x * weight).astype(x.dtype))


@lowering("aten::glu", dims=along("dim", 1))
def glu(x: Any, dim: int = -1) -> jax.Array:
    """Returns the first half times the sigmoid of the second."""
    first, second = jnp.split(x.astype(wide(x.dtype)), 2, dim)
    return (first * jax.nn.sigmoid(second)).astype(x.dtype)


@_activation("aten::rrelu_with_noise")
def rrelu(
    x: Any,
    noise: Any,
    lower: Any = 0.125,
    upper: Any = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> jax.Array:
    """Returns a leaky relu whose slope is the mean of the bounds, as in evaluation."""
    return leaky_relu(x, (lower + upper) / 2)


@lowering("aten::rrelu_with_noise_functional")
def rrelu_functional(x: Any, noise: Any, *options: Any) -> tuple[jax.Array, jax.Array]:
    """Computes rrelu, and returns the noise as it was."""
    y = rrelu(x.astype(wide(x.dtype)), noise, *options)
    return y.astype(x.dtype), noise


@lowering("fmapper::rrelu_with_noise_with_dropout", random=True)
def draw_rrelu(x: Any, noise: Any, *options: Any, key: Any) -> jax.Array:
    """Returns a leaky relu whose slopes are drawn for each element."""
    return draw_rrelu_functional(x, noise, *options, key=key)[0]


@lowering("fmapper::rrelu_with_noise_functional_with_dropout", random=True)
def draw_rrelu_functional(
    x: Any,
    noise: Any,
    lower: Any = 0.125,
    upper: Any = 1 / 3,
    training: bool = True,
    generator: Any = None,
    *,
    key: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns a leaky relu whose slopes are drawn for each element, and the slopes."""
    drawn = jax.random.uniform(key, x.shape, wide(x.dtype), lower, upper)
    slopes = jnp.where(x > 0, 1, drawn).astype(noise.dtype)
    return (x * slopes).astype(x.dtype), slopes
