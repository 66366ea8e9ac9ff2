"""Pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.table import dimensions, lowering
from fmapper_adapters.jax.aten.types import dtype_of, is_floating, wide


@lowering("aten::adaptive_avg_pool1d", "aten::adaptive_avg_pool2d", "aten::adaptive_avg_pool3d",
          "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d",
          dims=dimensions.pool)  # fmt: skip
def adaptive_avg_pool(x: Any, output_size: Any) -> jax.Array:
    """Averages over bins: bin i of m is from floor(i n / m) to ceil((i + 1) n / m)."""
    y = x.astype(wide(x.dtype))
    sizes = output_size if isinstance(output_size, tuple) else (output_size,)
    for dim, m in enumerate(sizes, x.ndim - len(sizes)):
        n = y.shape[dim]
        if isinstance(m, int) and m == 1:
            y = jnp.mean(y, dim, keepdims=True)
        elif isinstance(m, int) and m == 0:
            y = jnp.zeros((*y.shape[:dim], 0, *y.shape[dim + 1 :]), y.dtype)
        elif n % m == 0:
            y = jnp.mean(y.reshape(*y.shape[:dim], m, n // m, *y.shape[dim + 1 :]), dim + 1)
        else:
            bins = [slice(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
            means = [jnp.mean(y[(slice(None),) * dim + (b,)], dim, keepdims=True) for b in bins]
            y = jnp.concatenate(means, dim)
    return y.astype(x.dtype)


class _Windows:
    """The windows of a pooling.

    Attributes:
        count: The number of spatial dimensions.
        kernel, stride, padding, dilation: One number for each.
        outputs: The numbers of windows.
        widths: The padding before and after that all windows need.
    """

    def __init__(
        self,
        count: int,
        sizes: Sequence[Any],
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
    ) -> None:
        self.count = count
        self.kernel = _each(kernel, count)
        self.stride = _each(stride, count) if stride != () else self.kernel
        self.padding = _each(padding, count)
        self.dilation = _each(dilation, count)
        self.sizes = sizes
        self.outputs = []
        self.widths = []
        for n, k, s, p, d in self._rows():
            reach = d * (k - 1) + 1
            out = (n + 2 * p - reach + (s - 1 if ceil_mode else 0)) // s + 1
            # windows that begin in the padding at the end are dropped
            if ceil_mode and (out - 1) * s >= n + p:
                out = out - 1
            self.outputs.append(out)
            self.widths.append((p, (out - 1) * s + reach - n - p))
        if all(d == 1 for d in self.dilation):  # the only window may be far larger than the image
            self.kernel = tuple(
                min(k, n + 2 * p) if isinstance(n, int) and out == 1 else k
                for (n, k, _, p, _), out in zip(self._rows(), self.outputs, strict=True)
            )

    def _rows(self) -> Any:
        rows = (self.sizes, self.kernel, self.stride, self.padding, self.dilation)
        return zip(*rows, strict=True)

    def are_whole(self) -> bool:
        """Returns whether there is a single window that covers all elements."""
        return all(
            isinstance(n, int) and n > 0 and out == d == 1 and k - p >= n
            for (n, k, _, p, d), out in zip(self._rows(), self.outputs, strict=True)
        )

    def reduce(self, x: Any, value: Any, function: Any) -> jax.Array:
        """Reduces the windows, without dilation.

        A single window in a dimension needs no padding, although it may be hundreds of times as
        large as the image. Its sum is an ordinary reduction; its maximum stays a window, so that
        the first of several equal elements gets the gradient.
        """
        start = np.asarray(value, x.dtype)  # known while tracing: only then there is a gradient
        first = x.ndim - self.count
        kernel, stride, widths = [1] * first, [1] * first, [(0, 0, 0)] * first
        alone = []
        for i, (n, k, s, p, _) in enumerate(self._rows()):
            width = (*self.widths[i], 0)
            if isinstance(n, int) and self.outputs[i] == 1:
                size = min(n, k - p)
                x = jax.lax.slice_in_dim(x, 0, size, axis=first + i)
                k, s, width = size, 1, (0, 0, 0)  # noqa: PLW2901
                if function is jax.lax.add:
                    alone.append(first + i)
                    k = 1  # noqa: PLW2901
            kernel, stride, widths = [*kernel, k], [*stride, s], [*widths, width]
        if alone:
            x = jnp.expand_dims(jax.lax.reduce(x, start, function, alone), alone)
        if len(alone) == self.count:
            return x
        x = jax.lax.pad(x, start, widths)
        return jax.lax.reduce_window(x, start, function, kernel, stride, "VALID")

    def starts(self) -> list[Any]:
        """Returns where windows begin in each dimension of the array without padding."""
        return [
            jnp.arange(out) * s - p
            for out, s, p in zip(self.outputs, self.stride, self.padding, strict=True)
        ]


def _each(value: Any, count: int) -> tuple[Any, ...]:
    """Returns one number per spatial dimension, given one for all or one for each."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * count if len(values) == 1 else values


def _lowest(dtype: Any) -> Any:
    return -np.inf if is_floating(dtype) else int(np.iinfo(dtype).min)


def max_pool_with_indices(
    count: int,
    x: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the largest element of each window and its place in the plane; NaN is largest."""
    sizes = x.shape[x.ndim - count :]
    windows = _Windows(count, sizes, kernel_size, stride, padding, dilation, ceil_mode)
    indices = _argmax(x, windows.starts(), windows.kernel, windows.dilation)
    if all(d == 1 for d in windows.dilation) and not windows.are_whole():
        return windows.reduce(x, _lowest(x.dtype), jax.lax.max), indices
    return _look_up(x, indices, count), indices


lowering("aten::max_pool2d_with_indices", dims=dimensions.pool)(partial(max_pool_with_indices, 2))
lowering("aten::max_pool3d_with_indices")(partial(max_pool_with_indices, 3))


def max_pool_backward(
    count: int,
    gradient: Any,
    x: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
) -> jax.Array:
    """Adds the gradient of each window at its largest element, which windows may share."""
    batch = x.shape[: x.ndim - count]
    rows = math.prod(batch)
    at = indices.reshape(rows, -1)
    flat = jnp.zeros((rows, math.prod(x.shape[x.ndim - count :])), x.dtype)
    summed = flat.at[jnp.arange(rows)[:, None], at].add(gradient.reshape(at.shape))
    return summed.reshape(x.shape)


lowering("aten::max_pool2d_with_indices_backward")(partial(max_pool_backward, 2))
lowering("aten::max_pool3d_with_indices_backward")(partial(max_pool_backward, 3))


_UNROLLED = 16  # elements of a window along one dimension that are compared one after the other


def _argmax(
    x: Any, starts: Sequence[Any], kernel: Sequence[int], dilation: Sequence[int]
) -> jax.Array:
    """Returns where in its plane the first largest element of each window is, or its last NaN.

    Args:
        x: Of shape (..., *plane).
        starts: Where windows begin, for each dimension of the plane; may be outside.
        kernel: The windows' sizes.
        dilation: The distance of elements in a window.
    """
    places = []
    for n, start, k, d in zip(
        x.shape[x.ndim - len(kernel) :], starts, kernel, dilation, strict=True
    ):
        start = jnp.asarray(start)[:, None]  # noqa: PLW2901
        # Positions outside are moved onto elements of the window, which changes nothing.
        first, last = -(start // d), (n - 1 - start) // d
        offset = jnp.clip(jnp.arange(k), jnp.maximum(first, 0), last)
        places.append(jnp.clip(start + offset * d, 0, n - 1))
    return _argmax_of(x, places)


def _argmax_of(x: Any, places: Sequence[Any]) -> jax.Array:
    """Returns where in its plane the first largest element of each window is, or its last NaN.

    The search goes along one dimension after the other, the last one first.

    Args:
        x: Of shape (..., *plane).
        places: For each dimension of the plane where the elements of windows are, of shape
            (windows, elements), in order.
    """
    value = jax.lax.stop_gradient(x)
    sizes = x.shape[x.ndim - len(places) :]
    where: Any = None  # indices in the plane of the dimensions searched so far
    inner: Any = 1
    for i in reversed(range(len(places))):
        axis = x.ndim - len(places) + i
        best = _best_along(value, places[i], axis)
        at = best * inner
        if where is not None:
            at = at + jnp.take_along_axis(where, best, axis)
        value, where, inner = jnp.take_along_axis(value, best, axis), at, inner * sizes[i]
    return where.astype(dtype_of("int64"))


def _best_along(x: Any, places: Any, axis: int) -> Any:
    """Returns the places of the first largest elements of windows, or of the last NaN."""
    outputs, k = places.shape
    after = (1,) * (x.ndim - 1 - axis)
    if isinstance(k, int) and k <= _UNROLLED:
        best: Any = None
        for offset in range(k):
            at = places[:, offset].reshape(-1, *after)
            value = _take(x, places[:, offset], axis)
            if best is None:
                best, where = value, jnp.broadcast_to(at, value.shape)
                continue
            better = value > best
            if is_floating(x):
                better = better | jnp.isnan(value)
            best, where = jnp.where(better, value, best), jnp.where(better, at, where)
        return where
    windows = _take(x, places.reshape(-1), axis)
    windows = windows.reshape(*x.shape[:axis], outputs, k, *x.shape[axis + 1 :])
    first = jnp.argmax(windows, axis + 1)  # of the first NaN, if there is one
    if is_floating(x):
        is_nan = jnp.isnan(windows)
        last = k - 1 - jnp.argmax(jnp.flip(is_nan, axis + 1), axis + 1)
        first = jnp.where(jnp.any(is_nan, axis + 1), last, first)
    rows = jnp.arange(outputs).reshape(-1, *after)
    return jnp.asarray(places)[rows, first]  # of the windows


def _take(x: Any, places: Any, axis: int) -> Any:
    """Returns the elements at places along an axis."""
    is_known = isinstance(places, np.ndarray) and places.size == x.shape[axis]
    if is_known and (places == np.arange(places.size)).all():
        return x
    return jnp.take(x, places, axis, mode="clip")


def _look_up(x: Any, indices: Any, count: int) -> jax.Array:
    """Looks up the elements of each plane at indices."""
    flat = x.reshape(*x.shape[: x.ndim - count], -1)
    at = indices.reshape(*flat.shape[:-1], -1)
    return jnp.take_along_axis(flat, at, -1).reshape(indices.shape)


@lowering("aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d")
def adaptive_max_pool(x: Any, output_size: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the largest element of each bin, and where in its plane it is."""
    count = len(output_size)
    places = []
    for n, m in zip(x.shape[x.ndim - count :], output_size, strict=True):
        begin = np.arange(m) * n // max(m, 1)
        end = -(-(np.arange(m) + 1) * n // max(m, 1))
        longest = np.arange(int(max(end - begin, default=0)))
        # smaller windows repeat the last element, which changes nothing
        places.append(np.minimum(begin[:, None] + longest, end[:, None] - 1))
    if x.size == 0 or 0 in output_size:
        shape = (*x.shape[: x.ndim - count], *output_size)
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, dtype_of("int64"))
    indices = _argmax_of(x, places)
    return _look_up(x, indices, count), indices


@lowering("aten::fractional_max_pool2d", "aten::fractional_max_pool3d")
def fractional_max_pool(
    x: Any, kernel_size: Any, output_size: Any, random_samples: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the largest element of windows that begin at random places, and where it is.

    Args:
        x: Of shape (batch, channels, *plane) or without batch.
        kernel_size: The windows' sizes.
        output_size: The number of windows per dimension.
        random_samples: Of shape (batch, channels, dimensions), from 0 to 1.
    """
    count = len(kernel_size)
    planes = x.reshape(-1, *x.shape[x.ndim - count :])
    samples = random_samples.reshape(-1, count)

    def of_plane(plane: Any, sample: Any) -> Any:
        # torch orders samples from the last dimension for planes, from the first for volumes
        order = (1, 0) if count == 2 else (0, 1, 2)
        starts = [
            _fractional_starts(n, k, m, sample[order[i]])
            for i, (n, k, m) in enumerate(zip(plane.shape, kernel_size, output_size, strict=True))
        ]
        return _argmax(plane, starts, kernel_size, (1,) * count)

    indices = jax.vmap(of_plane)(planes, samples)
    indices = indices.reshape(*x.shape[: x.ndim - count], *output_size)
    return _look_up(x, indices, count), indices


def _fractional_starts(size: Any, kernel: int, outputs: int, sample: Any) -> jax.Array:
    last = jnp.full((1,), size - kernel)
    if outputs == 1:
        return last
    alpha = jnp.asarray((size - kernel) / (outputs - 1), sample.dtype)
    steps = jnp.arange(outputs - 1).astype(sample.dtype)
    starts = ((steps + sample) * alpha).astype("int32") - (sample * alpha).astype("int32")
    return jnp.concatenate([starts, last.astype("int32")])


@lowering("aten::max_unpool2d", "aten::max_unpool3d")
def max_unpool(
    x: Any, indices: Any, output_size: Any, stride: Any = (), padding: Any = ()
) -> jax.Array:
    """Puts elements back at the indices of their planes, with zeros elsewhere."""
    count = len(output_size)
    batch = x.shape[: x.ndim - count]
    values = x.reshape(math.prod(batch), -1)
    at = indices.reshape(values.shape)
    rows = jnp.arange(values.shape[0])[:, None]
    y = jnp.zeros((values.shape[0], math.prod(output_size)), x.dtype).at[rows, at].set(values)
    return y.reshape(*batch, *output_size)


@lowering("aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d", dims=dimensions.pool)
def avg_pool(
    x: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    """Returns the mean of each window; halves in float32.

    With `count_include_pad` the padding counts, except for what `ceil_mode` adds.
    """
    count = len(kernel_size)
    sizes = x.shape[x.ndim - count :]
    windows = _Windows(count, sizes, kernel_size, stride, padding, 1, ceil_mode)
    sums = windows.reduce(x.astype(wide(x.dtype)), 0, jax.lax.add)
    if divisor_override is not None:
        divisor = jnp.asarray(divisor_override, sums.dtype)
    else:
        divisor = jnp.ones((), sums.dtype)
        starts = windows.starts()
        for i, (n, k, p) in enumerate(zip(sizes, windows.kernel, windows.padding, strict=True)):
            end = jnp.minimum(starts[i] + k, n + p)
            begin = starts[i]
            if not count_include_pad:
                begin, end = jnp.maximum(begin, 0), jnp.minimum(end, n)
            length = (end - begin).astype(sums.dtype)
            divisor = divisor * length.reshape(-1, *(1,) * (count - 1 - i))
    if is_floating(sums):
        return (sums / divisor).astype(x.dtype)
    return jax.lax.div(sums, jnp.broadcast_to(divisor, sums.shape)).astype(x.dtype)
