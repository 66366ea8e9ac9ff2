"""Losses. `reduction` is 0 for none, 1 for the mean, 2 for the sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.pointwise.elementwise import absolute
from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import promote, wide

_NEVER = -1e30  # log of probability zero; finite, for finite gradients


def _reduce(x: Any, reduction: int, dtype: Any) -> jax.Array:
    if reduction == 1:
        x = jnp.mean(x)
    elif reduction == 2:
        x = jnp.sum(x)
    return x.astype(dtype)


def _wide(*arrays: Any) -> tuple[Any, ...]:
    """Returns arrays in the dtype of the computation, and the dtype of the result."""
    arrays = promote(*arrays)
    dtype = arrays[0].dtype
    return (*(a if a is None else a.astype(wide(dtype)) for a in arrays), dtype)


@lowering("aten::mse_loss")
def mse_loss(x: Any, target: Any, reduction: int = 1) -> jax.Array:
    """Returns the square of the difference."""
    x, target, dtype = _wide(x, target)
    return _reduce(jnp.square(x - target), reduction, dtype)


@lowering("aten::smooth_l1_loss")
def smooth_l1_loss(x: Any, target: Any, reduction: int = 1, beta: float = 1.0) -> jax.Array:
    """Returns half the square over beta for small differences, else the size less half of beta."""
    x, target, dtype = _wide(x, target)
    size = absolute(x - target)
    if beta == 0:
        return _reduce(size, reduction, dtype)
    near = size < beta
    loss = jnp.where(near, 0.5 * _square(near, size) / beta, size - 0.5 * beta)
    return _reduce(loss, reduction, dtype)


@lowering("aten::huber_loss")
def huber_loss(x: Any, target: Any, reduction: int = 1, delta: float = 1.0) -> jax.Array:
    """Returns half the square for small differences, else delta * (size - delta / 2)."""
    x, target, dtype = _wide(x, target)
    size = jnp.abs(x - target)
    near = size <= delta
    loss = jnp.where(near, 0.5 * _square(near, size), delta * (size - 0.5 * delta))
    return _reduce(loss, reduction, dtype)


def _square(near: Any, size: Any) -> Any:
    """Returns squares where they are used, else zero: the slope of infinity would be NaN."""
    return jnp.square(jnp.where(near, size, 0.0))


@lowering("aten::binary_cross_entropy")
def binary_cross_entropy(x: Any, target: Any, weight: Any = None, reduction: int = 1) -> jax.Array:
    """Computes the loss of probabilities; their logarithms are at least -100, as in torch."""
    x, target, weight, dtype = _wide(x, target, weight)
    loss = _entropy(x, target)
    if weight is not None:
        loss = loss * weight
    return _reduce(loss, reduction, dtype)


@jax.custom_jvp
def _entropy(x: Any, target: Any) -> jax.Array:
    return (target - 1) * _log_at_least(1 - x, -100.0) - target * _log_at_least(x, -100.0)


_entropy.defjvps(  # torch's clamp lets gradients pass
    lambda slope, value, x, target: slope * (x - target) / jnp.maximum((1 - x) * x, 1e-12),
    lambda slope, value, x, target: slope * (jnp.log1p(-x) - jnp.log(x)),
)


def _log_at_least(x: Any, least: float) -> jax.Array:
    safe = jnp.where(x > 0, x, jnp.ones((), x.dtype))
    log = jnp.where(x > 0, jnp.log(safe), jnp.where(x == 0, -jnp.inf, jnp.nan))
    return jnp.where(log < least, jnp.asarray(least, x.dtype), log)


@lowering("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss(
    x: Any, target: Any, weight: Any, reduction: int, ignore_index: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of log-probabilities, `(N, C, ...)` or `(C,)`, and the sum of the weights.

    The loss is NaN for a target that is not a class, where torch raises an error.
    """
    single = x.ndim == 1
    if single:
        x, target = x[None], target.reshape(1)
    dtype = x.dtype
    y = x.astype(wide(dtype))
    classes = x.shape[1]
    ignored = target == ignore_index
    valid = (target >= 0) & (target < classes)
    index = jnp.where(valid & ~ignored, target, 0)
    picked = -jnp.squeeze(jnp.take_along_axis(y, jnp.expand_dims(index, 1), 1), 1)
    picked = jnp.where(valid, picked, jnp.nan)
    if weight is None:
        weights = jnp.where(ignored, 0, 1).astype(y.dtype)
    else:
        weights = jnp.where(ignored, 0, weight.astype(y.dtype)[index])
    loss = jnp.where(ignored, 0, picked * weights)
    if reduction == 0:
        return (loss[0] if single else loss).astype(dtype), jnp.zeros((), dtype)
    total, count = jnp.sum(loss), jnp.sum(weights)
    return (total / count if reduction == 1 else total).astype(dtype), count.astype(dtype)


@lowering("aten::multi_margin_loss")
def multi_margin_loss(
    x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> jax.Array:
    """Returns the mean over the other classes of `max(0, margin - x[target] + x) ** p`."""
    dtype = x.dtype
    y = jnp.atleast_2d(x.astype(wide(dtype)))
    index = target.reshape(-1)
    gap = margin - jnp.take_along_axis(y, index[:, None], 1) + y
    above = gap > 0
    loss = jnp.where(above, jnp.where(above, gap, 1) ** int(p), 0)
    if weight is not None:
        loss = loss * weight.astype(y.dtype)[index][:, None]
    others = jnp.arange(y.shape[1])[None, :] != index[:, None]
    loss = jnp.sum(jnp.where(others, loss, 0), 1) / y.shape[1]
    return _reduce(loss[0] if reduction == 0 and target.ndim == 0 else loss, reduction, dtype)


@lowering("aten::multilabel_margin_loss_forward")
def multilabel_margin_loss(x: Any, target: Any, reduction: int) -> tuple[jax.Array, jax.Array]:
    """Returns the margins between target and other classes, and which classes are targets.

    Targets end at the first -1 of each row; a class that is listed twice counts twice.
    """
    dtype = x.dtype
    y, labels = jnp.atleast_2d(x.astype(wide(dtype))), jnp.atleast_2d(target)
    if y.shape[1] == 0:
        return _reduce(jnp.sum(y, 1), reduction, dtype), jnp.zeros(x.shape, dtype)
    listed = jnp.cumsum(labels < 0, 1) == 0
    index = jnp.where(listed, labels, 0)
    rows = jnp.arange(y.shape[0])[:, None]
    is_target = jnp.zeros(y.shape, bool).at[rows, index].max(listed)
    wanted = jnp.take_along_axis(y, index, 1)
    gap = 1 - wanted[:, :, None] + y[:, None, :]
    counted = listed[:, :, None] & ~is_target[:, None, :] & (gap > 0)
    loss = jnp.sum(jnp.where(counted, gap, 0), (1, 2)) / y.shape[1]
    if reduction == 0 and x.ndim < 2:
        loss = loss[0]
    return _reduce(loss, reduction, dtype), is_target.astype(dtype).reshape(target.shape)


# --- connectionist temporal classification ------------------------------------------------------


@lowering("aten::ctc_loss", "fmapper::ctc_loss")
def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> jax.Array:
    """Returns the negative logarithm of the probability of the targets, over all alignments."""
    single = log_probs.ndim == 2
    loss, _ = ctc_loss_forward(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    )
    if single:
        loss = loss.reshape(1)
    if reduction == 1:
        counts = jnp.maximum(jnp.asarray(target_lengths).reshape(-1), 1)
        return jnp.mean(loss / counts.astype(loss.dtype))
    if reduction == 2:
        return jnp.sum(loss)
    return loss[0] if single else loss


@lowering("aten::_ctc_loss", "aten::_use_cudnn_ctc_loss")
def ctc_loss_forward(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of each sequence, and the logarithms of the forward probabilities.

    Args:
        log_probs: `(time, batch, classes)`, or `(time, classes)` for one sequence.
        targets: `(batch, length)`, or the targets of all sequences one after the other.
        input_lengths: The length of each input sequence.
        target_lengths: The length of each target sequence.
        blank: The class of blanks between labels.
        zero_infinity: Zero, and no gradient, where no alignment is long enough.
    """
    single = log_probs.ndim == 2
    if single:
        log_probs = log_probs[:, None]
    steps, batch, _ = log_probs.shape
    times = jnp.asarray(input_lengths).reshape(-1)
    counts = jnp.asarray(target_lengths).reshape(-1)
    labels = _rows(targets, counts, batch)
    length = labels.shape[1]
    index = jnp.arange(2 * length + 1)
    odd = index % 2 == 1
    extended = jnp.where(
        odd, jnp.repeat(labels, 2, 1)[:, jnp.maximum(index - 1, 0)] if length else 0, blank
    )
    before = jnp.pad(extended, ((0, 0), (2, 0)), constant_values=blank)[:, : 2 * length + 1]
    skips = odd & (index > 1) & (extended != before)
    inside = index < 2 * counts[:, None] + 1
    y = log_probs.astype(wide(log_probs.dtype))
    emitted = jnp.take_along_axis(y, jnp.broadcast_to(extended, (steps, *extended.shape)), 2)
    never = jnp.asarray(_NEVER, y.dtype)
    start = jnp.where((index < 2) & inside, emitted[0] if steps else never, never)

    def step(alpha: Any, now: Any) -> tuple[Any, Any]:
        time, emission = now
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=_NEVER)[:, :-1]
        two = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=_NEVER)[:, :-2]
        reached = jnp.logaddexp(alpha, one)
        reached = jnp.where(skips, jnp.logaddexp(reached, two), reached)
        new = jnp.where(inside, jnp.maximum(reached + emission, never), never)
        new = jnp.where(time < times[:, None], new, alpha)
        return new, new

    last, alphas = jax.lax.scan(step, start, (jnp.arange(1, steps), emitted[1:]))
    ends = 2 * counts[:, None]
    final = jnp.take_along_axis(last, ends, 1)
    other = jnp.take_along_axis(last, jnp.maximum(ends - 1, 0), 1)
    total = jnp.where(counts > 0, jnp.logaddexp(final, other)[:, 0], final[:, 0])
    impossible = total < _NEVER / 2
    loss = jnp.where(impossible, 0.0 if zero_infinity else jnp.inf, -total)
    # Without input, the loss of an empty target is zero.
    nothing = jnp.where(counts == 0, 0.0, 0.0 if zero_infinity else jnp.inf)
    loss = jnp.where(times == 0, nothing, loss)
    # torch's gradient includes the term of log_softmax: it adds the probabilities.
    alive = jnp.arange(steps)[:, None, None] < times[:, None]
    mass = jnp.sum(jnp.where(alive, jnp.exp(y), 0), (0, 2))
    loss = jnp.where(
        jnp.isfinite(loss) & ~impossible, loss + mass - jax.lax.stop_gradient(mass), loss
    )
    alphas = jnp.moveaxis(jnp.concatenate([start[None], alphas]), 0, 1)
    alphas = jnp.where(alphas < _NEVER / 2, -jnp.inf, alphas).astype(log_probs.dtype)
    loss = loss.astype(log_probs.dtype)
    return (loss[0], alphas[0]) if single else (loss, alphas)


def _rows(targets: Any, counts: Any, batch: Any) -> Any:
    """Returns targets as one row for each sequence."""
    if targets.ndim == 2:
        return targets
    if batch == 1:
        return targets[None]
    first = jnp.cumsum(counts) - counts
    places = first[:, None] + jnp.arange(targets.shape[0])[None, :]
    return targets[jnp.clip(places, 0, max(targets.shape[0] - 1, 0))]


@lowering("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def linear_cross_entropy_of_each(
    x: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    weight: Any,
    ignore_index: int,
    *how_torch_splits_it: Any,
) -> jax.Array:
    """Computes the cross entropy of each row of a linear layer, as `linear_cross_entropy`."""
    loss, _ = _linear_cross_entropy(x, linear_weight, target, linear_bias, weight, ignore_index)
    return loss.astype(x.dtype)


@lowering("torch_nn::_linear_cross_entropy_batch_chunked")
def linear_cross_entropy(
    x: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    weight: Any,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *how_torch_splits_it: Any,
) -> tuple[jax.Array, ...]:
    """Returns the mean or the sum of the cross entropies, and the gradients that torch returns too.

    torch's backward reads them. Here the loss itself is differentiated, and unused gradients are
    removed by the compiler.
    """
    wanted = how_torch_splits_it[-3:]

    def total(x: Any, linear_weight: Any, bias: Any) -> jax.Array:
        loss, weights = _linear_cross_entropy(x, linear_weight, target, bias, weight, ignore_index)
        return jnp.sum(loss) / (jnp.sum(weights) if reduction == "mean" else 1)

    zeros = jnp.zeros(linear_weight.shape[:-1], linear_weight.dtype)
    given = (x, linear_weight, zeros if linear_bias is None else linear_bias)
    gradients = jax.grad(total, (0, 1, 2))(*given)
    nothing = (jnp.zeros((0, 0), x.dtype), jnp.zeros((0, 0), x.dtype), jnp.zeros((0,), x.dtype))
    outputs = [
        g.astype(x.dtype) if w else n for g, w, n in zip(gradients, wanted, nothing, strict=True)
    ]
    return (total(*given).astype(x.dtype), *outputs)


def _linear_cross_entropy(
    x: Any, linear_weight: Any, target: Any, bias: Any, weight: Any, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of each row, times the weight of its class, and these weights."""
    dtype = wide(x.dtype)
    logits = jnp.matmul(x.astype(dtype), linear_weight.astype(dtype).T)
    if bias is not None:
        logits = logits + bias.astype(dtype)
    counts = target != ignore_index
    classes = jnp.where(counts, target, 0)
    each = jnp.ones(logits.shape[-1:], dtype) if weight is None else weight.astype(dtype)
    weights = jnp.where(counts, each[classes], 0)
    chances = jax.nn.log_softmax(logits, -1)
    picked = jnp.take_along_axis(chances, classes[:, None], 1)[:, 0]
    return jnp.where(counts, -picked * weights, 0), weights
