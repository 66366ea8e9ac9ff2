"""Kernels of `fmapper.nn.functional` for NumPy: the forward pass, vectorised.

float16 and bfloat16 are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fmapper_adapters.numpy import special
from fmapper_adapters.numpy.adapter import np_dtype

Array: TypeAlias = np.ndarray[Any, Any]
Sizes: TypeAlias = tuple[int, ...]
Pads: TypeAlias = tuple[tuple[int, int], ...]


# Differences of infinities are NaN, as in torch and JAX, which do not warn either.
_QUIET = np.errstate(invalid="ignore", divide="ignore")


def _wide(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype.itemsize < 4 else np.asarray(x)


def _as(x: Array, like: Array) -> Array:
    return np.asarray(x, like.dtype)


# --- linear maps ---------------------------------------------------------------------------------


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """Returns a matrix product."""
    out = _wide(x) @ _wide(weight).T
    return _as(out if bias is None else out + _wide(bias), x)


def embedding(x: Array, weight: Array) -> Array:
    """Computes `take`.

    Raises:
        IndexError: An index is negative or too large.
    """
    if x.size and (x.min() < 0 or x.max() >= len(weight)):
        raise IndexError(
            f"embedding: the indices range from {x.min()} to {x.max()}, but the table has "
            f"{len(weight)} rows"
        )
    return np.asarray(np.take(weight, x, axis=0))


def one_hot(x: Array, num_classes: int, dtype: Any) -> Array:
    """Compares with all classes."""
    kind = x.dtype if dtype is None else np_dtype(str(np.dtype(dtype)))
    return np.asarray((x[..., None] == np.arange(num_classes)).astype(kind))


# --- convolution ---------------------------------------------------------------------------------


def _windows(x: Array, kernel: Sequence[int], stride: Sizes, dilation: Sizes) -> Array:
    """Returns views: (batch, channels, *new sizes, *kernel)."""
    count = len(kernel)
    spread = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    windows = sliding_window_view(x, spread, tuple(range(2, 2 + count)))
    steps = [slice(None, None, s) for s in (*stride, *dilation)]
    views: Array = windows[(slice(None), slice(None), *steps)]
    return views


def _pad(x: Array, padding: Pads, value: Any = 0) -> Array:
    if not any(map(any, padding)):
        return x
    return np.pad(x, ((0, 0), (0, 0), *padding), constant_values=value)


def conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Pads,
    dilation: Sizes,
    groups: int,
) -> Array:
    """Multiplies all windows with the kernels, in one matrix product per group."""
    outputs, inputs, *kernel = weight.shape
    windows = _windows(_pad(_wide(x), padding), kernel, stride, dilation)
    count = len(kernel)
    batch, new = len(x), windows.shape[2 : 2 + count]
    split = windows.reshape(batch, groups, inputs, *new, *kernel)
    places = tuple(range(3, 3 + count))
    order = (1, 0, *places, 2, *range(3 + count, 3 + 2 * count))
    window = inputs * math.prod(kernel)
    rows = split.transpose(order).reshape(groups, batch * math.prod(new), window)
    kernels = _wide(weight).reshape(groups, outputs // groups, window)
    out = rows @ kernels.transpose(0, 2, 1)
    out = out.reshape(groups, batch, *new, outputs // groups)
    out = np.moveaxis(out, (1, 0, -1), (0, 1, 2)).reshape(batch, outputs, *new)
    return _as(out if bias is None else out + _channels(_wide(bias), out.ndim), x)


def _channels(scale: Array, rank: int) -> Array:
    return scale.reshape(-1, *(1,) * (rank - 2))


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
    inputs, outputs, *kernel = weight.shape
    batch, _, *spatial = x.shape
    full = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    new = [(n - 1) * s + 1 for n, s in zip(spatial, stride, strict=True)]
    # Padded by at least zero; negative padding is cropped afterwards.
    sizes = [n + 2 * f + e for n, f, e in zip(new, full, extra, strict=True)]
    holes = np.zeros((batch, inputs, *sizes), _wide(x).dtype)
    places = [slice(f, f + n, s) for f, n, s in zip(full, new, stride, strict=True)]
    holes[(slice(None), slice(None), *places)] = x
    split = weight.reshape(groups, inputs // groups, outputs, *kernel).swapaxes(1, 2)
    turned = np.flip(split, tuple(range(3, 3 + len(kernel))))
    kernels = turned.reshape(groups * outputs, inputs // groups, *kernel)
    ones = (1,) * len(kernel)
    out = conv(holes, _wide(kernels), None, ones, ((0, 0),) * len(kernel), dilation, groups)
    cut = [slice(p, n - p) for p, n in zip(padding, out.shape[2:], strict=True)]
    out = out[(slice(None), slice(None), *cut)]
    return _as(out if bias is None else out + _channels(_wide(bias), out.ndim), x)


# --- pooling -------------------------------------------------------------------------------------


def _pool(x: Array, window: Sizes, stride: Sizes) -> tuple[Array, Sizes]:
    windows = _windows(x, window, stride, (1,) * len(window))
    return windows, tuple(range(windows.ndim - len(window), windows.ndim))


def max_pool(x: Array, window: Sizes, stride: Sizes, padding: Sizes) -> Array:
    """Returns the maximum over windows."""
    least = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    windows, axes = _pool(_pad(x, tuple((p, p) for p in padding), least), window, stride)
    return np.asarray(windows.max(axes))


def avg_pool(
    x: Array, window: Sizes, stride: Sizes, padding: Sizes, count_include_pad: bool
) -> Array:
    """Returns the sum over windows, divided by the number of elements."""
    pads = tuple((p, p) for p in padding)
    windows, axes = _pool(_pad(_wide(x), pads), window, stride)
    total = windows.sum(axes)
    if count_include_pad:
        return _as(total / math.prod(window), x)
    ones, axes = _pool(_pad(np.ones((1, 1, *x.shape[2:]), total.dtype), pads), window, stride)
    return _as(total / ones.sum(axes), x)


# --- activations ---------------------------------------------------------------------------------


def relu(x: Array) -> Array:
    """Returns the maximum with zero."""
    return np.asarray(np.maximum(x, np.zeros((), x.dtype)))


def leaky_relu(x: Array, slope: float) -> Array:
    """Chooses by the sign."""
    wide = _wide(x)
    return _as(np.where(wide > 0, wide, wide * slope), x)


def elu(x: Array, alpha: float) -> Array:
    """Chooses by the sign."""
    wide = _wide(x)
    return _as(np.where(wide > 0, wide, alpha * np.expm1(np.minimum(wide, 0))), x)


@_QUIET
def gelu(x: Array, by_tanh: bool) -> Array:
    """Computes gelu by erfc in float64, or by the formula with tanh."""
    if by_tanh:
        wide = _wide(x)
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
        return _as(0.5 * wide * (1 + np.tanh(inner)), x)
    double = np.asarray(x, np.float64)
    return _as(0.5 * double * special.erfc(-double / math.sqrt(2)), x)


def sigmoid(x: Array) -> Array:
    """Computes sigmoid without overflow: exp of numbers below zero only."""
    wide = _wide(x)
    small = np.exp(-np.abs(wide))
    return _as(np.where(wide < 0, small, 1) / (1 + small), x)


@_QUIET
def silu(x: Array) -> Array:
    """Returns the product with the sigmoid."""
    wide = _wide(x)
    return _as(wide * sigmoid(wide), x)


@_QUIET
def softplus(x: Array, beta: float) -> Array:
    """Computes `logaddexp` with zero."""
    wide = _wide(x) * beta
    return _as(np.logaddexp(wide, np.zeros((), wide.dtype)) / beta, x)


def _largest(x: Array, axis: int) -> Array:
    return np.asarray(x.max(axis, keepdims=True, initial=-np.inf))  # of empty arrays, too


@_QUIET
def softmax(x: Array, axis: int) -> Array:
    """Subtracts the maximum first."""
    wide = _wide(x)
    powers = np.exp(wide - _largest(wide, axis))
    return _as(powers / powers.sum(axis, keepdims=True), x)


@_QUIET
def log_softmax(x: Array, axis: int) -> Array:
    """Subtracts the maximum first."""
    wide = _wide(x)
    shifted = wide - _largest(wide, axis)
    return _as(shifted - np.log(np.exp(shifted).sum(axis, keepdims=True)), x)


@_QUIET
def logsumexp(x: Array, axis: int, keepdim: bool) -> Array:
    """Computes logsumexp, less the maximum first unless that is infinite."""
    wide = _wide(x)
    top = _largest(wide, axis)
    top = np.where(np.isfinite(top), top, np.zeros((), wide.dtype))
    out = np.log(np.exp(wide - top).sum(axis, keepdims=True)) + top
    return _as(out if keepdim else out.squeeze(axis), x)


# --- normalisation -------------------------------------------------------------------------------


def _scale(x: Array, like: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        x = x * _wide(weight)
    if bias is not None:
        x = x + _wide(bias)
    return _as(x, like)


def _moments(x: Array, axes: Sizes) -> tuple[Array, Array]:
    """Returns the array less its mean, and the variance."""
    centred = x - x.mean(axes, keepdims=True)
    return centred, np.square(centred).mean(axes, keepdims=True)


def _last(x: Array, count: int) -> Sizes:
    return tuple(range(x.ndim - count, x.ndim))


def layer_norm(
    x: Array, shape: Sizes, weight: Array | None, bias: Array | None, eps: float
) -> Array:
    """Normalises in plain operations."""
    centred, var = _moments(_wide(x), _last(x, len(shape)))
    return _scale(centred / np.sqrt(var + eps), x, weight, bias)


def rms_norm(x: Array, shape: Sizes, weight: Array | None, eps: float | None) -> Array:
    """Normalises in plain operations."""
    wide = _wide(x)
    square = np.square(wide).mean(_last(x, len(shape)), keepdims=True)
    small = _epsilon(x.dtype) if eps is None else eps
    return _scale(wide / np.sqrt(square + small), x, weight, None)


def _epsilon(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def group_norm(
    x: Array, groups: int, weight: Array | None, bias: Array | None, eps: float
) -> Array:
    """Normalises in plain operations."""
    size = math.prod(x.shape[1:]) // groups
    centred, var = _moments(_wide(x).reshape(x.shape[0], groups, size), (2,))
    normal = (centred / np.sqrt(var + eps)).reshape(x.shape)
    return _scale(normal, x, *_per_channel(x.ndim, weight, bias))


def _per_channel(rank: int, *scales: Array | None) -> list[Array | None]:
    return [None if s is None else _channels(s, rank) for s in scales]


def batch_norm_with(
    x: Array, mean: Array, var: Array, weight: Array | None, bias: Array | None, eps: float
) -> Array:
    """Normalises with a given mean and variance."""
    centre, spread = (_channels(_wide(s), x.ndim) for s in (mean, var))
    normal = (_wide(x) - centre) / np.sqrt(spread + eps)
    return _scale(normal, x, *_per_channel(x.ndim, weight, bias))


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
    out = _scale(centred / np.sqrt(own_var + eps), x, *_per_channel(x.ndim, weight, bias))
    count = x.size // x.shape[1]
    new_var = own_var.reshape(-1) * (count / (count - 1))
    return out, _mix(mean, wide.mean(axes), momentum), _mix(var, new_var, momentum)


def _mix(old: Array, new: Array, momentum: float) -> Array:
    return _as((1 - momentum) * _wide(old) + momentum * new, old)


def dropout(x: Array, kept: Array, factor: float) -> Array:
    """Sets dropped elements to zero, even NaN and infinities."""
    return np.where(kept, _as(_wide(x) * factor, x), np.zeros((), x.dtype))


# --- attention -----------------------------------------------------------------------------------


def attention(
    query: Array, key: Array, value: Array, mask: Array | None, is_causal: bool, scale: float
) -> Array:
    """Attends in plain operations; rows that are fully masked give zeros."""
    scores = _wide(query) @ _wide(key).swapaxes(-1, -2) * scale
    if is_causal:
        mask = np.tril(np.ones(scores.shape[-2:], bool))
    if mask is None:
        weights = softmax(scores, scores.ndim - 1)
    elif mask.dtype == bool:
        scores = np.where(mask, scores, np.finfo(scores.dtype).min)
        weights = np.where(mask, softmax(scores, scores.ndim - 1), 0)
    else:
        scores = scores + _wide(mask)
        weights = softmax(scores, scores.ndim - 1)
    return _as(weights @ _wide(value), query)


# --- losses --------------------------------------------------------------------------------------


def _reduce(losses: Array, reduction: str, count: int, like: Array) -> Array:
    if reduction == "none":
        return _as(losses, like)
    total = losses.sum()
    with np.errstate(invalid="ignore"):  # the mean over no targets is NaN
        return _as(np.divide(total, count) if reduction == "mean" else total, like)


def cross_entropy(
    x: Array, target: Array, axis: int, ignore: int, reduction: str, smoothing: float
) -> Array:
    """Returns the entries of `log_softmax` at the indices.

    Raises:
        IndexError: A target is not a class.
    """
    logs = log_softmax(_wide(x), axis)
    counted = target != ignore
    chosen = np.where(counted, target, 0)
    if chosen.size and (chosen.min() < 0 or chosen.max() >= x.shape[axis]):
        raise IndexError(
            f"cross_entropy: the targets range from {chosen.min()} to {chosen.max()}, but there "
            f"are {x.shape[axis]} classes"
        )
    losses = -np.take_along_axis(logs, np.expand_dims(chosen, axis), axis).squeeze(axis)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * logs.mean(axis)
    losses = np.where(counted, losses, np.zeros((), losses.dtype))
    return _reduce(losses, reduction, int(counted.sum()), x)


def soft_cross_entropy(
    x: Array, target: Array, axis: int, reduction: str, smoothing: float
) -> Array:
    """Returns the product of probabilities and `log_softmax`."""
    logs = log_softmax(_wide(x), axis)
    classes = x.shape[axis]
    weights = _wide(target)
    if smoothing:
        weights = weights * (1 - smoothing) + smoothing / classes
    return _reduce(-(weights * logs).sum(axis), reduction, x.size // classes, x)


def mse_loss(x: Array, target: Array, reduction: str) -> Array:
    """Returns the squared difference."""
    return _reduce(np.square(_wide(x) - _wide(target)), reduction, x.size, x)
