"""Histograms and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.layout.creation import linspace
from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import cast, default_dtype, dtype_of, is_floating, wide


@lowering("aten::bincount", data_dependent_shape=True)
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> jax.Array:
    """Counts each number from 0 to the largest, or sums their weights."""
    largest = int(np.asarray(x).max()) + 1 if x.size else 0
    length = max(largest, minlength)
    if weights is None:
        return jnp.zeros(length, dtype_of("int64")).at[x].add(1)
    weights = weights if weights.dtype == np.float32 else cast(weights, "float64")
    return jnp.zeros(length, weights.dtype).at[x].add(weights)


@lowering("aten::histc")
def histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> jax.Array:
    """Counts the elements in each of a number of equal bins, in the dtype of the array."""
    inner = wide(x.dtype) if is_floating(x) else default_dtype()
    y = x.reshape(-1).astype(inner)
    low, high = jnp.asarray(min, inner), jnp.asarray(max, inner)
    if x.size:
        unknown = low == high
        low, high = jnp.where(unknown, jnp.min(y), low), jnp.where(unknown, jnp.max(y), high)
    flat_range = low == high
    low, high = jnp.where(flat_range, low - 1, low), jnp.where(flat_range, high + 1, high)
    inside = (y >= low) & (y <= high)
    place = ((y - low) * bins / (high - low)).astype(jnp.int32)
    place = jnp.where(inside, jnp.minimum(place, bins - 1), bins)
    counts = jnp.zeros(bins + 1, dtype_of("int64")).at[place].add(1)
    return counts[:bins].astype(x.dtype)


@lowering("aten::histogram.bin_ct")
def histogram(
    x: Any, bins: int = 100, *, range: Any = None, weight: Any = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the number of elements in each bin, or the sum of their weights, and the edges."""
    rows = x.reshape(-1, 1)
    (edges,) = histogramdd_edges(rows, (bins,), range=range)
    return _count(rows, (edges,), weight, density), edges


@lowering("aten::histogram.bins_tensor")
def histogram_of_edges(
    x: Any, bins: Any, *, weight: Any = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Counts the elements between given edges, and returns the edges too."""
    return _count(x.reshape(-1, 1), (bins,), weight, density), bins


@lowering("aten::_histogramdd_bin_edges")
def histogramdd_edges(
    x: Any, bins: Sequence[int], *, range: Any = None, weight: Any = None, density: bool = False
) -> tuple[jax.Array, ...]:
    """Returns the edges of equal bins for each column of x; its last dimension has the columns."""
    rows = x.reshape(-1, x.shape[-1])
    edges = []
    for column, count in enumerate(bins):
        if range is not None:
            low, high = (jnp.asarray(v, x.dtype) for v in range[2 * column : 2 * column + 2])
        elif rows.shape[0]:
            low, high = jnp.min(rows[:, column]), jnp.max(rows[:, column])
        else:
            low, high = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
        same = low == high
        low, high = jnp.where(same, low - 0.5, low), jnp.where(same, high + 0.5, high)
        edges.append(linspace(low, high, count + 1, dtype=x.dtype))
    return tuple(edges)


@lowering("aten::_histogramdd_from_bin_cts")
def histogramdd(
    x: Any, bins: Sequence[int], *, range: Any = None, weight: Any = None, density: bool = False
) -> jax.Array:
    """Counts the rows in each bin."""
    return _count(x, histogramdd_edges(x, bins, range=range), weight, density)


@lowering("aten::_histogramdd_from_bin_tensors")
def histogramdd_of_edges(
    x: Any, bins: Sequence[Any], *, weight: Any = None, density: bool = False
) -> jax.Array:
    """Counts the rows between given edges."""
    return _count(x, bins, weight, density)


def _count(x: Any, edges: Sequence[Any], weight: Any, density: bool) -> jax.Array:
    """Counts elements per bin; bins hold their lower edge, the last one its upper edge too."""
    rows = x.reshape(-1, x.shape[-1])
    inside = jnp.ones(rows.shape[0], bool)
    places = []
    for column, ends in enumerate(edges):
        y = rows[:, column]
        inside &= (y >= ends[0]) & (y <= ends[-1])
        place = jnp.searchsorted(ends, y, side="right") - 1
        places.append(jnp.clip(place, 0, ends.shape[0] - 2))
    weights = jnp.ones(rows.shape[0], x.dtype) if weight is None else weight.reshape(-1)
    shape = tuple(ends.shape[0] - 1 for ends in edges)
    counts = jnp.zeros(shape, x.dtype).at[tuple(places)].add(jnp.where(inside, weights, 0))
    if not density:
        return counts
    for column, ends in enumerate(edges):
        widths = jnp.diff(ends)
        counts = counts / widths.reshape(-1, *(1,) * (len(edges) - 1 - column))
    total = jnp.sum(jnp.where(inside, weights, 0))
    return counts / total
