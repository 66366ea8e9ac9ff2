"""Patches of images as columns, and columns as sums of patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.table import lowering

Pair = Sequence[int]


def _counts(sizes: Any, kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> list[Any]:
    """Returns the number of patches in each dimension."""
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, d, p, s in zip(sizes, kernel, dilation, padding, stride, strict=True)
    ]


def _each_place(
    counts: Sequence[Any], kernel: Pair, dilation: Pair, stride: Pair
) -> Iterator[tuple[Any, ...]]:
    """Yields, for each element of the kernel, the slices of the padded image that it sees."""
    for offsets in np.ndindex(*kernel):
        yield tuple(
            slice(int(o) * d, int(o) * d + (c - 1) * s + 1, s)
            for o, d, c, s in zip(offsets, dilation, counts, stride, strict=True)
        )


@lowering("aten::im2col")
def im2col(x: Any, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair) -> jax.Array:
    """Turns (batch, channels, h, w) into (batch, channels * kernel, patches)."""
    *batch, channels, h, w = x.shape
    counts = _counts((h, w), kernel_size, dilation, padding, stride)
    widths = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in padding]
    y = jnp.pad(x, widths)
    seen = [y[(..., *place)] for place in _each_place(counts, kernel_size, dilation, stride)]
    columns = jnp.stack(seen, x.ndim - 2)
    return columns.reshape(*batch, channels * len(seen), counts[0] * counts[1])


@lowering("aten::col2im")
def col2im(
    x: Any, output_size: Sequence[Any], kernel_size: Pair, dilation: Pair, padding: Pair,
    stride: Pair
) -> jax.Array:  # fmt: skip
    """Turns (batch, channels * kernel, patches) into (batch, channels, h, w), adding overlaps."""
    *batch, rows, _ = x.shape
    count = kernel_size[0] * kernel_size[1]
    counts = _counts(output_size, kernel_size, dilation, padding, stride)
    patches = x.reshape(*batch, rows // count, count, *counts)
    padded = [n + 2 * p for n, p in zip(output_size, padding, strict=True)]
    y = jnp.zeros((*batch, rows // count, *padded), x.dtype)
    for i, place in enumerate(_each_place(counts, kernel_size, dilation, stride)):
        y = y.at[(..., *place)].add(patches[..., i, :, :])
    inner = tuple(slice(p, p + n) for n, p in zip(output_size, padding, strict=True))
    return y[(..., *inner)]
