"""Normalisation and dropout."""

from __future__ import annotations

import math
from typing import Any

from fmapper import random
from fmapper.nn.arguments import Ints, common, floating_kernels, kernels, shape_error


def layer_norm(
    x: Any, normalized_shape: Ints, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Normalises the last dimensions to mean 0 and variance 1, then scales (Ba et al., 2016).

    Args:
        x: Of shape (..., *normalized_shape).
        normalized_shape: The sizes of these dimensions.
        weight: The scale, of that shape.
        bias: The offset, of that shape.
        eps: Added to the variance.
    """
    floating_kernels("layer_norm", x)
    functional = common("layer_norm", x, ("weight", weight), ("bias", bias))
    shape = _last("layer_norm", x, normalized_shape, weight=weight, bias=bias)
    return functional.layer_norm(x, shape, weight, bias, eps)


def rms_norm(x: Any, normalized_shape: Ints, weight: Any = None, eps: float | None = None) -> Any:
    """Normalises the last dimensions to mean square 1, then scales (Zhang and Sennrich, 2019).

    Args:
        x: Of shape (..., *normalized_shape).
        normalized_shape: The sizes of these dimensions.
        weight: The scale, of that shape.
        eps: Added to the mean square; the machine epsilon of x's dtype if it is None.
    """
    floating_kernels("rms_norm", x)
    functional = common("rms_norm", x, ("weight", weight))
    shape = _last("rms_norm", x, normalized_shape, weight=weight)
    return functional.rms_norm(x, shape, weight, eps)


def _last(function: str, x: Any, shape: Ints, **scales: Any) -> tuple[int, ...]:
    expected = (shape,) if isinstance(shape, int) else tuple(shape)
    if not expected or tuple(x.shape[len(x.shape) - len(expected) :]) != expected:
        raise shape_error(function, f"x that ends in {expected}", x=x)
    for name, scale in scales.items():
        if scale is not None and tuple(scale.shape) != expected:
            raise shape_error(function, f"a {name} of shape {expected}", **{name: scale})
    return expected


def group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Normalises groups of channels to mean 0 and variance 1, then scales (Wu and He, 2018).

    Args:
        x: Of shape (batch, channels, ...).
        num_groups: The number of groups.
        weight: The scale, of shape (channels,).
        bias: The offset, of shape (channels,).
        eps: Added to the variance.
    """
    floating_kernels("group_norm", x)
    functional = common("group_norm", x, ("weight", weight), ("bias", bias))
    if len(x.shape) < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise shape_error(
            "group_norm", f"x (batch, channels, ...) with channels in {num_groups} groups", x=x
        )
    _per_channel("group_norm", x, weight=weight, bias=bias)
    return functional.group_norm(x, num_groups, weight, bias, eps)


def batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, Any, Any]:
    """Normalises channels over the batch to mean 0, variance 1, then scales (Ioffe, Szegedy, 2015).

    Nothing is changed in place: use the running values that are returned.

    Args:
        x: Of shape (batch, channels, ...).
        running_mean: The running mean, of shape (channels,).
        running_var: The running variance, of shape (channels,).
        weight: The scale, of shape (channels,).
        bias: The offset, of shape (channels,).
        training: Whether to use the mean and variance of the batch instead of the running values.
        momentum: The weight of the batch in the running values: new = (1 - momentum) * old +
            momentum * batch, with the unbiased variance. No gradient flows through these.
        eps: Added to the variance.

    Returns:
        The result, the new running mean and the new running variance. Without `training`, the last
        two are the arguments.
    """
    floating_kernels("batch_norm", x)
    functional = common(
        "batch_norm",
        x,
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("weight", weight),
        ("bias", bias),
    )
    if len(x.shape) < 2:
        raise shape_error("batch_norm", "x (batch, channels, ...)", x=x)
    _per_channel(
        "batch_norm",
        x,
        running_mean=running_mean,
        running_var=running_var,
        weight=weight,
        bias=bias,
    )
    if not training:
        out = functional.batch_norm_with(x, running_mean, running_var, weight, bias, eps)
        return out, running_mean, running_var
    if math.prod(x.shape) <= x.shape[1]:
        raise shape_error("batch_norm", "more than one value per channel, or training=False", x=x)
    result: tuple[Any, Any, Any] = functional.batch_norm(
        x, running_mean, running_var, weight, bias, momentum, eps
    )
    return result


def _per_channel(function: str, x: Any, **scales: Any) -> None:
    for name, scale in scales.items():
        if scale is not None and tuple(scale.shape) != (x.shape[1],):
            raise shape_error(function, f"a {name} (channels,)", x=x, **{name: scale})


def dropout(x: Any, rate: float, key: Any, *, training: bool = True) -> Any:
    """Sets elements to zero with probability `rate` and scales the others by `1 / (1 - rate)`.

    Args:
        x: Of any shape.
        rate: The probability.
        key: A key of `fmapper.random`, of any backend; inside torch.compile a tensor. The same key
            drops the same elements on every backend: those where
            `random.bernoulli(key, 1 - rate, x.shape)` is false.
        training: Whether to drop elements; if not, x is returned.
    """
    functional = kernels("dropout", x)
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout: rate={rate} is not a probability")
    if not training or rate == 0:
        return x
    floating_kernels("dropout", x)
    mask = random.bernoulli(key, 1 - rate, tuple(x.shape), like=x)
    return functional.dropout(x, mask, 0.0 if rate == 1 else 1 / (1 - rate))
