"""Convolutions as matrix products, where these are faster on XLA.

On the CPU, XLA's convolution transposes torch's filters in every call, which costs more than the
sums if an image is small, and its kernel is slow for images of a few pixels. A product uses the
filters as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def pays(x: Any, weight: Any, places: Sequence[Any]) -> bool:
    """Returns whether a convolution is faster as a matrix product.

    That is so for kernels of a single pixel, which need no copy, and if there are more filters than
    output pixels, so that the filters dominate the cost.

    Args:
        x: Images (batch, ...).
        weight: Filters (out, in, ...), of one group.
        places: The spatial sizes of the result.
    """
    if x.dtype not in (jnp.float32, jnp.float64):
        return False
    if math.prod(weight.shape[2:]) == 1:
        return True
    count = (x.shape[0], *places)
    is_static = all(isinstance(size, int) for size in count)
    return is_static and 0 < math.prod(count) <= weight.shape[0]


def convolve(
    x: Any,
    weight: Any,
    places: Sequence[Any],
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[Any, Any]],
    rhs_dilation: Sequence[int],
    precision: Any,
    preferred_element_type: Any,
    **_: Any,
) -> Any:
    """Cross-correlates x (batch, ..., in) with weight (out, in, ...), channels last.

    Each patch becomes a row in the layout of a filter, kernel positions within channels. The
    options are those of `jax.lax.conv_general_dilated`.
    """
    if any(tuple(width) != (0, 0) for width in padding):  # negative padding crops
        widths = [(0, 0, 0), *((before, after, 0) for before, after in padding), (0, 0, 0)]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    kernel = weight.shape[2:]
    count = len(kernel)
    if math.prod(kernel) == 1:
        strides = (1, *window_strides, 1)
        x = jax.lax.slice(x, (0,) * x.ndim, x.shape, strides) if max(strides) > 1 else x
    else:
        sizes = zip(kernel, places, window_strides, rhs_dilation, strict=True)
        for i, (size, number, step, apart) in enumerate(sizes):
            x = _split_axis(x, 1 + 2 * i, size, number, step, apart)
        inside = range(2, 2 + 2 * count, 2)
        x = x.transpose(0, *range(1, 1 + 2 * count, 2), 1 + 2 * count, *inside)
        x = x.reshape(x.shape[0], *places, weight.shape[1] * math.prod(kernel))
    rows, filters = x, weight.reshape(weight.shape[0], weight.shape[1] * math.prod(kernel))
    sums = {"precision": precision, "preferred_element_type": preferred_element_type}
    if not _are_few((x.shape[0], *places)):
        return jax.lax.dot_general(rows, filters, (((count + 1,), (1,)), ((), ())), **sums)
    columns = jax.lax.dot_general(filters, rows, (((1,), (count + 1,)), ((), ())), **sums)
    return jnp.moveaxis(columns, 0, -1)


def _are_few(sizes: Sequence[Any]) -> bool:
    """Returns whether the filters are the larger matrix of a product, which then comes first.

    Measured: for up to 16 pixels this order takes half the time, from 49 on a third more.
    """
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= _FEW


_FEW = 32


def _split_axis(x: Any, axis: int, size: int, count: Any, step: int, apart: int) -> Any:
    """Splits an axis in two: positions of the result, and the window of a filter at each.

    Going one dimension at a time needs a slice per row of the kernel, not per element: the 256
    slices for a kernel of 16 x 16 took XLA six seconds to compile.
    """
    if size == step and apart == 1:  # patches side by side
        x = jax.lax.slice_in_dim(x, 0, count * size, axis=axis)
        return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    before = (slice(None),) * axis
    reach = (count - 1) * step + 1
    seen = [x[(*before, slice(i * apart, i * apart + reach, step))] for i in range(size)]
    return jnp.stack(seen, axis + 1)
