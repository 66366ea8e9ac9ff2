"""Kernels of `fmapper.nn.functional` for JAX, by `jax.lax` and `jax.nn`.

Functions of several primitives are jitted, so that outside of `jax.jit` a call is one dispatch.
float16 and bfloat16 are summed in float32, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array: TypeAlias = Any
Sizes: TypeAlias = tuple[int, ...]
Pads: TypeAlias = tuple[tuple[int, int], ...]

_SPATIAL = "DHW"

relu = jax.nn.relu
leaky_relu = jax.nn.leaky_relu
elu = jax.nn.elu
silu = jax.nn.silu
sigmoid = jax.nn.sigmoid


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


# --- linear maps ---------------------------------------------------------------------------------


@jax.jit
def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """Returns a contraction, without a transposed copy."""
    out = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return (out if bias is None else out + bias).astype(x.dtype)


@jax.jit
def embedding(x: Array, weight: Array) -> Array:
    """Computes `take`, with NaN for indices out of range, negative ones included."""
    indices = (
        jnp.where(x < 0, weight.shape[0], x) if jnp.issubdtype(x.dtype, np.signedinteger) else x
    )
    return jnp.take(weight, indices, axis=0, mode="fill")


@partial(jax.jit, static_argnums=(1, 2))
def one_hot(x: Array, num_classes: int, dtype: Any) -> Array:
    """Computes `jax.nn.one_hot`."""
    wide = x.astype(np.int32) if x.dtype.itemsize < 4 else x  # else classes are counted in int8
    return jax.nn.one_hot(wide, num_classes, dtype=x.dtype if dtype is None else dtype)


# --- convolution ---------------------------------------------------------------------------------


def _layout(count: int) -> Any:
    spatial = _SPATIAL[-count:]
    return (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Pads,
    dilation: Sizes,
    groups: int,
) -> Array:
    """Computes `lax.conv_general_dilated`."""
    out = lax.conv_general_dilated(
        x,
        weight,
        stride,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=_layout(len(stride)),
        feature_group_count=groups,
    )
    return (out if bias is None else out + _channels(bias, out.ndim)).astype(x.dtype)


def _channels(scale: Array, rank: int) -> Array:
    return scale.reshape(-1, *(1,) * (rank - 2))


@partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def conv_transpose(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    extra: Sizes,
    groups: int,
    dilation: Sizes,
) -> Array:
    """Convolves the dilated x with the flipped kernel."""
    count = len(stride)
    inputs, outputs, *kernel = weight.shape
    split = weight.reshape(groups, inputs // groups, outputs, *kernel)
    turned = jnp.flip(jnp.swapaxes(split, 1, 2), tuple(range(3, 3 + count)))
    full = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    out = lax.conv_general_dilated(
        x,
        turned.reshape(groups * outputs, inputs // groups, *kernel),
        (1,) * count,
        [(f - p, f - p + e) for f, p, e in zip(full, padding, extra, strict=True)],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=_layout(count),
        feature_group_count=groups,
    )
    return (out if bias is None else out + _channels(bias, out.ndim)).astype(x.dtype)


# --- pooling -------------------------------------------------------------------------------------


def _windows(
    x: Array, initial: Any, function: Any, window: Sizes, stride: Sizes, around: Sizes
) -> Array:
    pads = [(0, 0), (0, 0), *((p, p) for p in around)]
    return lax.reduce_window(x, initial, function, (1, 1, *window), (1, 1, *stride), pads)


@partial(jax.jit, static_argnums=(1, 2, 3))
def max_pool(x: Array, window: Sizes, stride: Sizes, padding: Sizes) -> Array:
    """Computes `lax.reduce_window` with the maximum."""
    floating = jnp.issubdtype(x.dtype, np.floating)
    least = -np.inf if floating else np.iinfo(x.dtype).min
    return _windows(x, np.array(least, x.dtype), lax.max, window, stride, padding)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def avg_pool(
    x: Array, window: Sizes, stride: Sizes, padding: Sizes, count_include_pad: bool
) -> Array:
    """Computes `lax.reduce_window` with the sum, divided by the number of elements."""
    wide = _wide(x)
    total = _windows(wide, np.array(0, wide.dtype), lax.add, window, stride, padding)
    if count_include_pad or not any(padding):
        return (total / math.prod(window)).astype(x.dtype)
    ones = np.ones((1, 1, *x.shape[2:]), wide.dtype)
    count = _windows(ones, np.array(0, wide.dtype), lax.add, window, stride, padding)
    return (total / count).astype(x.dtype)


# --- activations ---------------------------------------------------------------------------------


def gelu(x: Array, by_tanh: bool) -> Array:
    """Computes `jax.nn.gelu`."""
    return jax.nn.gelu(x, approximate=by_tanh)


@jax.jit
def softplus(x: Array, beta: float) -> Array:
    """Computes `jax.nn.softplus`."""
    return (jax.nn.softplus(x * beta) / beta).astype(x.dtype)


@partial(jax.jit, static_argnums=1)
def softmax(x: Array, axis: int) -> Array:
    """Computes `jax.nn.softmax`."""
    return jax.nn.softmax(_wide(x), axis).astype(x.dtype)


@partial(jax.jit, static_argnums=1)
def log_softmax(x: Array, axis: int) -> Array:
    """Computes `jax.nn.log_softmax`."""
    return jax.nn.log_softmax(_wide(x), axis).astype(x.dtype)


@partial(jax.jit, static_argnums=(1, 2))
def logsumexp(x: Array, axis: int, keepdim: bool) -> Array:
    """Computes `jax.nn.logsumexp`."""
    return jax.nn.logsumexp(_wide(x), axis, keepdims=keepdim).astype(x.dtype)


# --- normalisation -------------------------------------------------------------------------------


def _scale(x: Array, dtype: Any, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        x = x * weight
    if bias is not None:
        x = x + bias
    return x.astype(dtype)


def _moments(x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    """Returns the array less its mean, and the variance."""
    centred = x - x.mean(axes, keepdims=True)
    return centred, jnp.square(centred).mean(axes, keepdims=True)


def _last(x: Array, count: int) -> Sizes:
    return tuple(range(x.ndim - count, x.ndim))


@partial(jax.jit, static_argnums=1)
def layer_norm(
    x: Array, shape: Sizes, weight: Array | None, bias: Array | None, eps: float
) -> Array:
    """Normalises in plain operations, which XLA fuses."""
    centred, var = _moments(_wide(x), _last(x, len(shape)))
    return _scale(centred * lax.rsqrt(var + eps), x.dtype, weight, bias)


@partial(jax.jit, static_argnums=1)
def rms_norm(x: Array, shape: Sizes, weight: Array | None, eps: float | None) -> Array:
    """Normalises in plain operations, which XLA fuses."""
    wide = _wide(x)
    square = jnp.square(wide).mean(_last(x, len(shape)), keepdims=True)
    info: Any = jnp.finfo
    small = float(info(x.dtype).eps) if eps is None else eps
    return _scale(wide * lax.rsqrt(square + small), x.dtype, weight, None)


@partial(jax.jit, static_argnums=1)
def group_norm(
    x: Array, groups: int, weight: Array | None, bias: Array | None, eps: float
) -> Array:
    """Normalises in plain operations, which XLA fuses."""
    split = _wide(x).reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    centred, var = _moments(split, (2,))
    normal = (centred * lax.rsqrt(var + eps)).reshape(x.shape)
    scales = (None if s is None else _channels(s, x.ndim) for s in (weight, bias))
    return _scale(normal, x.dtype, *scales)


@jax.jit
def batch_norm_with(
    x: Array, mean: Array, var: Array, weight: Array | None, bias: Array | None, eps: float
) -> Array:
    """Normalises with a given mean and variance."""
    mean, var = (_channels(_wide(lax.stop_gradient(s)), x.ndim) for s in (mean, var))
    scales = (None if s is None else _channels(s, x.ndim) for s in (weight, bias))
    return _scale((_wide(x) - mean) * lax.rsqrt(var + eps), x.dtype, *scales)


@jax.jit
def batch_norm(
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Normalises with mean and variance of the batch, and updates the running ones."""
    wide = _wide(x)
    axes = (0, *range(2, x.ndim))
    centred, own_var = _moments(wide, axes)
    scales = (None if s is None else _channels(s, x.ndim) for s in (weight, bias))
    out = _scale(centred * lax.rsqrt(own_var + eps), x.dtype, *scales)
    count = x.size // x.shape[1]
    new_mean = lax.stop_gradient(wide.mean(axes))
    new_var = lax.stop_gradient(own_var.reshape(-1)) * (count / (count - 1))
    return out, _mix(mean, new_mean, momentum), _mix(var, new_var, momentum)


def _mix(old: Array, new: Array, momentum: float) -> Array:
    return ((1 - momentum) * lax.stop_gradient(old) + momentum * new).astype(old.dtype)


@jax.jit
def dropout(x: Array, kept: Array, factor: float) -> Array:
    """Sets dropped elements to zero, even NaN and infinities."""
    # Rounded once: in bfloat16 the factor itself would be off by up to 0.4 %.
    return jnp.where(kept, (_wide(x) * factor).astype(x.dtype), jnp.zeros((), x.dtype))


# --- attention -----------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=4)
def attention(
    query: Array, key: Array, value: Array, mask: Array | None, is_causal: bool, scale: float
) -> Array:
    """Attends in plain operations; rows that are fully masked give zeros."""
    sums = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("...le,...se->...ls", query, key, preferred_element_type=sums) * scale
    if is_causal:
        mask = np.tril(np.ones(scores.shape[-2:], bool))
    if mask is None:
        weights = jax.nn.softmax(scores)
    elif mask.dtype == bool:
        weights = jax.nn.softmax(jnp.where(mask, scores, np.finfo(sums).min))
        weights = jnp.where(mask, weights, 0)  # a row that is masked entirely
    else:
        weights = jax.nn.softmax(scores + mask)
    out = jnp.einsum(
        "...ls,...sv->...lv", weights.astype(value.dtype), value, preferred_element_type=sums
    )
    return out.astype(query.dtype)


# --- losses --------------------------------------------------------------------------------------


def _reduce(losses: Array, reduction: str, count: Array | int, dtype: Any) -> Array:
    if reduction == "none":
        return losses.astype(dtype)
    total = losses.sum()
    return (total / count if reduction == "mean" else total).astype(dtype)


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def cross_entropy(
    x: Array, target: Array, axis: int, ignore: int, reduction: str, smoothing: float
) -> Array:
    """Returns the entries of `log_softmax` at the indices."""
    logs = jax.nn.log_softmax(_wide(x), axis)
    if target.dtype.itemsize < 4:
        target = target.astype(np.int32)  # otherwise `ignore`, too, would be taken modulo 256
    is_possible = ignore >= 0 or jnp.issubdtype(target.dtype, np.signedinteger)
    counted = target != ignore if is_possible else jnp.ones(target.shape, bool)
    # An index out of range gives NaN: a compiled program cannot raise. Below 0 jax counts from the
    # end.
    none = jnp.asarray(x.shape[axis], target.dtype)
    at = jnp.expand_dims(jnp.where(counted, jnp.where(target < 0, none, target), 0), axis)
    losses = -jnp.take_along_axis(logs, at, axis, mode="fill").squeeze(axis)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * logs.mean(axis)
    losses = jnp.where(counted, losses, 0)
    return _reduce(losses, reduction, counted.sum(), x.dtype)


@partial(jax.jit, static_argnums=(2, 3, 4))
def soft_cross_entropy(
    x: Array, target: Array, axis: int, reduction: str, smoothing: float
) -> Array:
    """Returns the product of probabilities and `log_softmax`."""
    logs = jax.nn.log_softmax(_wide(x), axis)
    classes = x.shape[axis]
    weights = _wide(target)
    if smoothing:
        weights = weights * (1 - smoothing) + smoothing / classes
    losses = -(weights * logs).sum(axis)
    return _reduce(losses, reduction, x.size // classes, x.dtype)


@partial(jax.jit, static_argnums=2)
def mse_loss(x: Array, target: Array, reduction: str) -> Array:
    """Returns the squared difference."""
    losses = jnp.square(_wide(x) - _wide(target))
    return _reduce(losses, reduction, x.size, jnp.result_type(x, target))
