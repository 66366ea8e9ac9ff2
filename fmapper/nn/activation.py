"""Activations and softmax."""

from __future__ import annotations

from typing import Any

from fmapper.nn.arguments import axis_of, floating_kernels, kernels


def relu(x: Any) -> Any:
    """Computes `max(x, 0)`; its gradient at 0 is 0."""
    return kernels("relu", x).relu(x)


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    """Returns x where it is positive, elsewhere `negative_slope * x`."""
    return floating_kernels("leaky_relu", x).leaky_relu(x, negative_slope)


def elu(x: Any, alpha: float = 1.0) -> Any:
    """Returns x where it is positive, elsewhere `alpha * (exp(x) - 1)` (Clevert et al., 2016)."""
    return floating_kernels("elu", x).elu(x, alpha)


def gelu(x: Any, approximate: str = "none") -> Any:
    """Multiplies x by the normal distribution function of x (Hendrycks and Gimpel, 2016).

    Args:
        x: Of any shape.
        approximate: "none", or "tanh" for the formula with a hyperbolic tangent.
    """
    functional = floating_kernels("gelu", x)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate={approximate!r} is neither 'none' nor 'tanh'")
    return functional.gelu(x, approximate == "tanh")


def silu(x: Any) -> Any:
    """Computes `x * sigmoid(x)`."""
    return floating_kernels("silu", x).silu(x)


def sigmoid(x: Any) -> Any:
    """Computes `1 / (1 + exp(-x))`."""
    return floating_kernels("sigmoid", x).sigmoid(x)


def softplus(x: Any, beta: float = 1.0) -> Any:
    """Computes `log(1 + exp(beta * x)) / beta` in full precision for all x, without a threshold."""
    return floating_kernels("softplus", x).softplus(x, beta)


def softmax(x: Any, dim: int = -1) -> Any:
    """Computes `exp(x) / sum(exp(x))` along a dimension, without overflow.

    float16 and bfloat16 are summed in float32.
    """
    return floating_kernels("softmax", x).softmax(x, axis_of("softmax", x, dim))


def log_softmax(x: Any, dim: int = -1) -> Any:
    """Returns the logarithm of `softmax`."""
    return floating_kernels("log_softmax", x).log_softmax(x, axis_of("log_softmax", x, dim))


def logsumexp(x: Any, dim: int = -1, *, keepdim: bool = False) -> Any:
    """Computes `log(sum(exp(x)))` along a dimension, without overflow."""
    return floating_kernels("logsumexp", x).logsumexp(x, axis_of("logsumexp", x, dim), keepdim)
