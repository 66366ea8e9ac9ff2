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
    batch, channels = x.shape[:2]
    kernel = weight.shape[2:]
    seen = []
    for at in range(math.prod(kernel)):
        offset: list[int] = []
        rest = at
        for size, step in zip(reversed(kernel), reversed(dilation), strict=True):
            rest, index = divmod(rest, size)
            offset.insert(0, index * step)
        slices = [
            slice(start, start + (count - 1) * step + 1, step)
            for start, count, step in zip(offset, places, stride, strict=True)
        ]
        seen.append(x[:, :, *slices])
    columns = jnp.stack(seen, 2) if len(seen) > 1 else seen[0]
    columns = columns.reshape(batch, channels * len(seen), math.prod(places))
    filters = weight.reshape(weight.shape[0], channels * len(seen))
    y = jax.lax.dot_general(filters, columns, (((1,), (1,)), ((), ())))
    return jnp.swapaxes(y, 0, 1).reshape(batch, weight.shape[0], *places)
