"""Functions of arrays, and initializers, that files take along.

A file takes the source of those that it names.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


def ntuple(size: Any, count: int) -> tuple[Any, ...]:
    """Returns a size for each dimension, where one may stand for all."""
    return (size,) * count if isinstance(size, int | float) else tuple(size)


def batch_norm(x, eps, weight=None, bias=None, mean=None, var=None):
    """Normalises the channels, which come second, by statistics that are given or their own."""
    axes, shape = (0, *range(2, x.ndim)), (-1, *(1,) * (x.ndim - 2))
    mean = x.mean(axes) if mean is None else mean
    var = x.var(axes) if var is None else var
    y = (x - mean.reshape(shape)) * jax.lax.rsqrt(var + eps).reshape(shape)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def interpolate(x, size=None, scale_factor=None, mode="nearest", align_corners=None):
    """Resizes the dimensions behind the channels, as PyTorch does."""
    if mode not in ("nearest", "linear", "bilinear", "trilinear"):
        raise ValueError(f"interpolation of the mode {mode}")
    rank = x.ndim - 2
    factors = ntuple(scale_factor, rank) if size is None else (None,) * rank
    sizes = ntuple(size, rank) if size is not None else x.shape[2:]
    for axis, (new, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        old, count = x.shape[axis], new if factor is None else int(new * factor)
        step = old / count if factor is None else 1 / factor
        at = jnp.arange(count)
        if mode == "nearest":
            x = jnp.take(x, jnp.minimum((at * step).astype(int), old - 1), axis=axis)
            continue
        if align_corners:
            place = at * ((old - 1) / max(count - 1, 1))
        else:
            place = jnp.maximum((at + 0.5) * step - 0.5, 0)
        low = jnp.minimum(place.astype(int), old - 1)
        weight = (place - low).reshape(-1, *(1,) * (x.ndim - axis - 1))
        below, above = (jnp.take(x, i, axis=axis) for i in (low, jnp.minimum(low + 1, old - 1)))
        x = below * (1 - weight) + above * weight
    return x


def softplus(x, beta=1.0, threshold=20.0):
    """Returns log(1 + exp(beta x)) / beta, and x itself above a threshold of beta x."""
    return jnp.where(beta * x > threshold, x, jax.nn.softplus(beta * x) / beta)


def flatten(x, start, end):
    """Makes one dimension of several, from one to another."""
    return x.reshape(*x.shape[:start], -1, *x.shape[end % x.ndim + 1 :])


def expand(x, sizes):
    """Repeats an array along dimensions of 1; those of -1 stay."""
    shape = (1,) * (len(sizes) - x.ndim) + x.shape
    pairs = zip(sizes, shape, strict=True)
    return jnp.broadcast_to(x, tuple(old if new == -1 else new for new, old in pairs))


def split(x, sizes, axis=0):
    """Splits x into parts of these sizes."""
    return jnp.split(x, [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)], axis)


def pad(x, sizes, value=0):
    """Puts a value around the last dimensions: before and behind the last one, the one before it.

    Takes them away for a size below zero.
    """
    ends = [(sizes[i], sizes[i + 1]) for i in range(len(sizes) - 2, -1, -2)]
    widths = [(0, 0, 0)] * (x.ndim - len(ends)) + [(before, after, 0) for before, after in ends]
    return jax.lax.pad(x, jnp.array(value, x.dtype), widths)


def chunk(x, count, axis=0):
    """Splits x into this many parts of one size, of which the last may be smaller or lacking."""
    size = -(-x.shape[axis] // count)
    return jnp.split(x, [*range(size, x.shape[axis], size)], axis)


def call_in_order(parts, segments, x, **_options):
    """Calls parts one after the other, each with the result of the one before."""
    for part in parts:
        x = part(x)
    return x


def with_attributes(module, **attributes):
    """Gives a module attributes."""
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def not_written(*_args, **_options):
    """Raises for the side of a condition that the file does not have."""
    raise NotImplementedError("the source does something else here, which no example has shown")


def nested_tuple(array):
    """Returns an array of NumPy as tuples, which a module can keep as a setting."""
    return tuple(map(nested_tuple, array)) if array.ndim else array.item()


def on_host(function, *args, **options):
    """Calls a function that draws with NumPy, each time that the model runs, under `jit` too."""

    def run():
        return np.asarray(function(*args, **options), like.dtype)

    state = np.random.get_state()
    like = jnp.asarray(function(*args, **options))
    np.random.set_state(state)
    return io_callback(run, jax.ShapeDtypeStruct(like.shape, like.dtype))


def uniform_init(low, high):
    """Returns an initializer that draws uniformly from an interval."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, low, high)

    return init


def normal_init(mean, std):
    """Returns an initializer that draws from a normal distribution."""

    def init(key, shape, dtype=jnp.float32):
        return mean + std * jax.random.normal(key, shape, dtype)

    return init


def trunc_normal_init(mean=0.0, std=1.0, a=-2.0, b=2.0):
    """Returns an initializer that draws from a normal distribution between a and b."""

    def init(key, shape, dtype=jnp.float32):
        low, high = (a - mean) / std, (b - mean) / std
        return mean + std * jax.random.truncated_normal(key, low, high, shape, dtype)

    return init


def square_subsequent_mask(size, device=None, dtype=jnp.float32):
    """Returns what is added to scores so that nothing attends to what comes later."""
    return jnp.triu(jnp.full((size, size), -jnp.inf, dtype), 1)


def reduction_of(losses, reduction):
    """Returns the mean or the sum of losses, or these themselves."""
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def kl_div(
    input, target, size_average=None, reduce=None, reduction="mean", log_target=False
):  # fmt: skip
    """Returns the divergence of distributions, of which the first is given by its logarithms."""
    if log_target:
        losses = jnp.exp(target) * (target - input)
    else:
        losses = jax.scipy.special.xlogy(target, target) - target * input
    if reduction == "batchmean":
        return losses.sum() / input.shape[0]
    return reduction_of(losses, reduction)


def gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
    """Returns the negative log-likelihood of normal distributions."""
    var = var + jax.lax.stop_gradient(jnp.maximum(var, eps) - var)
    losses = 0.5 * (jnp.log(var) + (input - target) ** 2 / var)
    return reduction_of(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


def instance_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True,
    momentum=0.1, eps=1e-5,
):  # fmt: skip
    """Normalises each channel, which come second, of each example."""
    if running_mean is not None:
        raise ValueError("running statistics")
    axes, shape = tuple(range(2, input.ndim)), (-1, *(1,) * (input.ndim - 2))
    mean, var = input.mean(axes, keepdims=True), input.var(axes, keepdims=True)
    y = (input - mean) * jax.lax.rsqrt(var + eps)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0,
):  # fmt: skip
    """Returns the cross entropy of logits, whose classes come second, and labels or their rates."""
    axis = min(1, input.ndim - 1)
    count, rest = input.shape[axis], (1,) * (input.ndim - axis - 1)
    scores = jax.nn.log_softmax(input, axis=axis)
    scores = scores if weight is None else scores * weight.reshape(-1, *rest)
    if target.shape == input.shape:
        target = target * (1 - label_smoothing) + label_smoothing / count
        losses, total = -(scores * target).sum(axis), input.size // count
    else:
        is_kept = target != ignore_index
        labels = jnp.where(is_kept, target, 0)
        losses = -jnp.take_along_axis(scores, jnp.expand_dims(labels, axis), axis).squeeze(axis)
        if label_smoothing:
            even = -scores.mean(axis)
            losses = (1 - label_smoothing) * losses + label_smoothing * even
        losses = jnp.where(is_kept, losses, 0)
        total = jnp.where(is_kept, 1 if weight is None else weight[labels], 0).sum()
    return losses.sum() / total if reduction == "mean" else reduction_of(losses, reduction)


def local_response_norm(input, size, alpha=1e-4, beta=0.75, k=1.0):
    """Divides by a power of the mean square of the channels around, which come second."""
    ends = ((0, 0), (size // 2, (size - 1) // 2), *((0, 0),) * (input.ndim - 2))
    squares = jnp.pad(input**2, ends)
    total = sum(squares[:, i : i + input.shape[1]] for i in range(size))
    return input / (k + alpha * total / size) ** beta


def multi_head_attention_forward(
    query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
    add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training=True,
    key_padding_mask=None, need_weights=True, attn_mask=None, use_separate_proj_weight=False,
    q_proj_weight=None, k_proj_weight=None, v_proj_weight=None, static_k=None, static_v=None,
    average_attn_weights=True, is_causal=False,
):  # fmt: skip
    """Returns attention of several heads over sequences in front of batches, and its weights."""
    matrices = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        matrices = jnp.split(in_proj_weight, 3)
    biases = (0, 0, 0) if in_proj_bias is None else jnp.split(in_proj_bias, 3)
    heads = [
        (x @ w.T + b).reshape(*x.shape[:2], num_heads, -1)
        for x, w, b in zip((query, key, value), matrices, biases, strict=True)
    ]
    scores = jnp.einsum("qbhd,kbhd->bhqk", *heads[:2]) / heads[0].shape[-1] ** 0.5
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.reshape(-1, num_heads, *attn_mask.shape[1:])
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None]
    for mask in (attn_mask, padding):
        if mask is not None:
            is_bool = mask.dtype == bool
            scores = jnp.where(mask, -jnp.inf, scores) if is_bool else scores + mask
    weights = jax.nn.softmax(scores)
    y = jnp.einsum("bhqk,kbhd->qbhd", weights, heads[2])
    y = y.reshape(*query.shape[:2], -1) @ out_proj_weight.T
    y = y if out_proj_bias is None else y + out_proj_bias
    if not need_weights:
        return y, None
    return y, weights.mean(1) if average_attn_weights else weights
