"""Normalisation over layers, groups and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.table import dimensions, lowering
from fmapper_adapters.jax.aten.types import wide


@lowering("aten::layer_norm", dims=dimensions.layer_norm)
def layer_norm(
    x: Any,
    normalized_shape: Sequence[Any],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> jax.Array:
    """Normalises the last dimensions to zero mean and unit variance; halves in float32."""
    return native_layer_norm(x, normalized_shape, weight, bias, eps)[0]


@lowering("aten::native_layer_norm", dims=dimensions.layer_norm)
def native_layer_norm(
    x: Any, normalized_shape: Sequence[Any], weight: Any, bias: Any, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the normalised array, the means and the reciprocal standard deviations."""
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
    return y.astype(x.dtype), mean.astype(x.dtype), rstd.astype(x.dtype)


@lowering("aten::group_norm", dims=dimensions.group_norm)
def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> jax.Array:
    """Normalises groups of channels to zero mean and unit variance; halves in float32."""
    return _group_norm(x, weight, bias, num_groups, eps)[0]


@lowering("aten::native_group_norm", dims=dimensions.group_norm)
def native_group_norm(
    x: Any, weight: Any, bias: Any, n: Any, c: Any, hxw: Any, group: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the normalised array, the means and the reciprocal deviations of the groups."""
    return _group_norm(x, weight, bias, group, eps)


def _group_norm(
    x: Any, weight: Any, bias: Any, groups: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, channels, *places = x.shape
    dtype = wide(x.dtype)
    y = x.astype(dtype).reshape(batch, groups, channels // groups, *places)
    within = tuple(range(2, y.ndim))
    mean = jnp.mean(y, within, keepdims=True)
    centred = y - mean
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, within, keepdims=True) + eps)
    y = (centred * rstd).reshape(x.shape)
    shape = (1, channels, *(1,) * (x.ndim - 2))
    if weight is not None:
        y = y * weight.astype(dtype).reshape(shape)
    if bias is not None:
        y = y + bias.astype(dtype).reshape(shape)
    mean, rstd = (statistic.reshape(batch, groups).astype(x.dtype) for statistic in (mean, rstd))
    return y.astype(x.dtype), mean, rstd


@lowering("aten::rms_norm", dims=dimensions.layer_norm)
def rms_norm(
    x: Any, normalized_shape: Sequence[Any], weight: Any = None, eps: float | None = None
) -> jax.Array:
    """Divides by the root of the mean of the squares over the last dimensions."""
    return fused_rms_norm(x, normalized_shape, weight, eps)[0]


@lowering("aten::_fused_rms_norm", dims=dimensions.layer_norm)
def fused_rms_norm(
    x: Any, normalized_shape: Sequence[Any], weight: Any, eps: float | None
) -> tuple[jax.Array, jax.Array]:
    """Computes rms_norm, and the factor. Without eps, that of the wider dtype is used."""
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    y = x.astype(wide(x.dtype))
    least = float(np.finfo(y.dtype).eps) if eps is None else eps
    rstd = jax.lax.rsqrt(jnp.mean(y * y, dims, keepdims=True) + least)
    y = y * rstd
    if weight is not None:
        y = y * weight.astype(y.dtype)
    return y.astype(x.dtype), rstd


@lowering("aten::_native_batch_norm_legit_no_training", dims=dimensions.batch_norm)
def batch_norm_no_training(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises by running averages over channels; the other results are empty."""
    y = _normalise(x, mean, var, weight, bias, eps)
    nothing = jnp.zeros((0,), wide(x.dtype))
    return y, nothing, nothing


@lowering("aten::_native_batch_norm_legit.no_stats", dims=dimensions.batch_statistics)
def batch_norm_without_averages(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises by the batch's own statistics; also returns means and reciprocal deviations."""
    mean, var = _statistics(x)
    return _normalise(x, mean, var, weight, bias, eps), mean, jax.lax.rsqrt(var + eps)


def _statistics(x: Any) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of each channel, over the batch."""
    dims = (0, *range(2, x.ndim))
    wider = x.astype(wide(x.dtype))
    mean = jnp.mean(wider, dims)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return mean, jnp.mean(jnp.square(wider - mean.reshape(shape)), dims)


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
    """Normalises by the batch's own statistics, and updates the running averages."""
    if not training:
        y, nothing, _ = batch_norm_no_training(
            x, weight, bias, running_mean, running_var, momentum, eps
        )
        return y, nothing, nothing, running_mean, running_var
    mean, var = _statistics(x)
    count = math.prod((x.shape[0], *x.shape[2:]))
    unbiased = var * (count / (count - 1))
    y = _normalise(x, mean, var, weight, bias, eps)
    return (
        y,
        mean,
        jax.lax.rsqrt(var + eps),
        _move_average(running_mean, mean, momentum),
        _move_average(running_var, unbiased, momentum),
    )


@lowering("aten::_batch_norm_with_update_functional")
def batch_norm_with_update(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[jax.Array, ...]:
    """Computes batch_norm_functional in training, with an empty reserve that some devices use."""
    results = batch_norm_functional(x, weight, bias, mean, var, True, momentum, eps)
    return (*results[:3], jnp.zeros((0,), "uint8"), *results[3:])


def _move_average(running: Any, new: Any, momentum: float) -> jax.Array:
    return (running * (1 - momentum) + new.astype(running.dtype) * momentum).astype(running.dtype)


def _normalise(x: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> jax.Array:
    """Computes (x - mean) / sqrt(var + eps) * weight + bias with one value per channel."""
    shape = (1, -1, *(1,) * (x.ndim - 2))
    dtype = wide(x.dtype)
    scale = jax.lax.rsqrt(var.astype(dtype) + eps)
    if weight is not None:
        scale = scale * weight.astype(dtype)
    y = (x.astype(dtype) - mean.astype(dtype).reshape(shape)) * scale.reshape(shape)
    if bias is not None:
        y = y + bias.astype(dtype).reshape(shape)
    return y.astype(x.dtype)
