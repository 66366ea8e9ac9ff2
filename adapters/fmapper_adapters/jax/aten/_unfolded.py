"""Convolutions as products of matrices, where XLA is faster with those.

On the CPU, XLA's convolution wants filters and images with the channels last. It turns torch's
filters around in every call, which costs more than the sums where an image is small, and its kernel
is slow for images of a few places. A product takes the filters as they lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def pays(x: Any, weight: Any, places: Sequence[Any]) -> bool:
    """Whether a convolution is faster as a product.

    It is for kernels of one place, for which nothing is copied, and where filters outnumber the
    places that they are applied to, so that they are what costs.

    Args:
        x: Images (batch, in, ...).
        weight: Filters (out, in, ...), of one group.
        places: The spatial sizes of the result.
    """
    if jax.default_backend() != "cpu" or x.dtype not in (jnp.float32, jnp.float64):
        return False
    if math.prod(weight.shape[2:]) == 1:
        return True
    count = (x.shape[0], *places)
    known = all(isinstance(size, int) for size in count)
    return known and 0 < math.prod(count) <= weight.shape[0]


def convolved(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    widths: Sequence[tuple[Any, Any]],
    dilation: Sequence[int],
    places: Sequence[Any],
) -> jax.Array:
    """The cross-correlation of x (batch, in, ...) with weight (out, in, ...).

    What each filter sees is laid out as a column, kernel places within channels, as filters lie.
    """
    if any(width != (0, 0) for width in widths):
        x = jnp.pad(x, ((0, 0), (0, 0), *widths))
    batch, channels, *_ = x.shape
    kernel = weight.shape[2:]
    for i, (size, count, step, apart) in enumerate(
        zip(kernel, places, stride, dilation, strict=True)
    ):
        x = _seen_along(x, 2 + 2 * i, size, count, step, apart)
    count = len(kernel)
    columns = x.transpose(0, 1, *range(3, 3 + 2 * count, 2), *range(2, 2 + 2 * count, 2))
    columns = columns.reshape(batch, channels * math.prod(kernel), math.prod(places))
    filters = weight.reshape(weight.shape[0], channels * math.prod(kernel))
    y = jax.lax.dot_general(filters, columns, (((1,), (1,)), ((), ())))
    return jnp.swapaxes(y, 0, 1).reshape(batch, weight.shape[0], *places)


def _seen_along(x: Any, axis: int, size: int, count: Any, step: int, apart: int) -> jax.Array:
    """The axis as two: the places of the result, and what a filter of this size sees at each.

    One dimension at a time takes as many slices as a kernel is long, not as it has elements: 256
    for a kernel of 16 x 16 took XLA six seconds to compile.
    """
    if size == step and apart == 1:  # patches side by side
        x = jax.lax.slice_in_dim(x, 0, count * size, axis=axis)
        return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    before = (slice(None),) * axis
    reach = (count - 1) * step + 1
    seen = [x[(*before, slice(i * apart, i * apart + reach, step))] for i in range(size)]
    return jnp.stack(seen, axis + 1)
