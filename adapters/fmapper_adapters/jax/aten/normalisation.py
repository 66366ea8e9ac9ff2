"""Normalisation over layers, groups and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import wide


@lowering("aten::layer_norm")
def layer_norm(
    x: Any,
    normalized_shape: Sequence[Any],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> jax.Array:
    """Zero mean and unit variance over the last dimensions; halves in float32."""
    return native_layer_norm(x, normalized_shape, weight, bias, eps)[0]


@lowering("aten::native_layer_norm")
def native_layer_norm(
    x: Any, normalized_shape: Sequence[Any], weight: Any, bias: Any, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The normalised array, the means and the reciprocal standard deviations."""
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    y = x.astype(wide(x.dtype))
    mean = jnp.mean(y, dims, keepdims=True)
    centred = y - mean
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, dims, keepdims=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * weight.astype(y.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype), mean, rstd


@lowering("aten::_native_batch_norm_legit_no_training")
def batch_norm_no_training(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalised by running averages over channels; the other results are empty."""
    y = _normalised(x, mean, var, weight, bias, eps)
    nothing = jnp.zeros((0,), wide(x.dtype))
    return y, nothing, nothing


@lowering("aten::_native_batch_norm_legit_functional")
def batch_norm_functional(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, ...]:
    """Normalised by the batch's own statistics, and the running averages moved towards them."""
    if not training:
        y, nothing, _ = batch_norm_no_training(
            x, weight, bias, running_mean, running_var, momentum, eps
        )
        return y, nothing, nothing, running_mean, running_var
    dims = (0, *range(2, x.ndim))
    wider = x.astype(wide(x.dtype))
    mean = jnp.mean(wider, dims)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    var = jnp.mean(jnp.square(wider - mean.reshape(shape)), dims)
    count = wider.size // wider.shape[1]
    unbiased = var * (count / (count - 1))
    y = _normalised(x, mean, var, weight, bias, eps)
    return (
        y,
        mean,
        jax.lax.rsqrt(var + eps),
        _moved(running_mean, mean, momentum),
        _moved(running_var, unbiased, momentum),
    )


def _moved(running: Any, new: Any, momentum: float) -> jax.Array:
    return (running * (1 - momentum) + new.astype(running.dtype) * momentum).astype(running.dtype)


def _normalised(x: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * weight + bias with one value per channel."""
    shape = (1, -1, *(1,) * (x.ndim - 2))
    dtype = wide(x.dtype)
    scale = jax.lax.rsqrt(var.astype(dtype) + eps)
    if weight is not None:
        scale = scale * weight.astype(dtype)
    y = (x.astype(dtype) - mean.astype(dtype).reshape(shape)) * scale.reshape(shape)
    if bias is not None:
        y = y + bias.astype(dtype).reshape(shape)
    return y.astype(x.dtype)
