"""Images of other sizes, by interpolation.

Positions are computed in float32, as torch does, so that ties fall to the same side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ConversionError
from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import is_floating, wide

Scales = Sequence[float | None]


def _sizes(x: Any, output_size: Any, scales: Any) -> tuple[Sequence[Any], Scales]:
    """Returns the output sizes and the scales, from whichever is known."""
    if output_size is not None:
        return output_size, (None,) * len(output_size)
    spatial = x.shape[x.ndim - len(scales) :]
    sizes = [_scaled_size(n, s) for n, s in zip(spatial, scales, strict=True)]
    return sizes, tuple(scales)


def _scaled_size(n: Any, scale: float) -> Any:
    if isinstance(n, int):
        return math.floor(n * scale)
    if scale == int(scale):
        return n * int(scale)
    if 1 / scale == int(1 / scale):
        return n // int(1 / scale)
    raise ValueError(f"a symbolic size cannot be multiplied by {scale}; pass output_size")


def _step(n: Any, m: Any, align_corners: bool, scale: float | None, dtype: Any) -> Any:
    """Returns the distance in the input between neighbouring output pixels."""
    one = _array(1, dtype)
    if align_corners:
        return _array(n - 1, dtype) / _array(m - 1, dtype) if _is_more_than_one(m) else one * 0
    if scale is not None and scale > 0:
        return _array(1.0 / scale, dtype)
    return _array(n, dtype) / _array(m, dtype)


def _is_more_than_one(m: Any) -> bool:
    return not isinstance(m, int) or m > 1


def _array(x: Any, dtype: Any) -> Any:
    """Makes a NumPy array if a size is known, so that positions are constants of the program."""
    return np.asarray(x, dtype) if isinstance(x, int | float) else jnp.asarray(x, dtype)


def _range(m: Any, dtype: Any) -> Any:
    return np.arange(m, dtype=dtype) if isinstance(m, int) else jnp.arange(m).astype(dtype)


def _positions(n: Any, m: Any, align_corners: bool, scale: float | None, dtype: Any) -> Any:
    """Returns the position in the input, in pixels, of each pixel of the output."""
    step = _step(n, m, align_corners, scale, dtype)
    at = _range(m, dtype)
    half = _array(0.5, dtype)
    return at * step if align_corners else step * (at + half) - half


def _precision(x: Any) -> Any:
    return np.dtype("float64") if x.dtype == np.dtype("float64") else np.dtype("float32")


def _nearest(exact: bool) -> Callable[[Any, Sequence[Any], Scales], jax.Array]:
    def lower(x: Any, sizes: Sequence[Any], scales: Scales) -> jax.Array:
        for dim, (m, scale) in enumerate(zip(sizes, scales, strict=True), x.ndim - len(sizes)):
            n = x.shape[dim]
            dtype = _precision(x)
            step = _step(n, m, False, scale, dtype)
            at = (_range(m, dtype) + _array(0.5 if exact else 0.0, dtype)) * step
            xp = np if isinstance(at, np.ndarray) else jnp
            at = xp.minimum(xp.floor(at).astype("int32"), n - 1)
            x = jnp.take(x, jnp.asarray(at), axis=dim, mode="clip")
        return x

    return lower


def _enter_nearest(name: str, exact: bool) -> None:
    resize = _nearest(exact)

    @lowering(f"aten::{name}.vec")
    def by_vector(x: Any, output_size: Any, scale_factors: Any) -> jax.Array:
        return resize(x, *_sizes(x, output_size, scale_factors))

    @lowering(f"aten::{name}.default")
    def by_size(x: Any, output_size: Any, *scales: Any) -> jax.Array:
        return resize(x, output_size, _pad(scales, len(output_size)))


for _dims in (1, 2, 3):
    _enter_nearest(f"upsample_nearest{_dims}d", False)
    _enter_nearest(f"_upsample_nearest_exact{_dims}d", True)


def _pad(scales: Sequence[Any], count: int) -> Scales:
    return (*scales, *(None,) * (count - len(scales)))


def _blend(x: Any, dim: int, taps: Sequence[tuple[Any, Any]]) -> jax.Array:
    """Returns the sum over taps of weights times the elements at indices of one dimension."""
    shape = [1] * x.ndim
    shape[dim] = -1
    total: Any = None
    for at, weight in taps:
        part = jnp.take(x, jnp.asarray(at), axis=dim, mode="clip")
        part = part * jnp.asarray(weight, x.dtype).reshape(shape)
        total = part if total is None else total + part
    return total


def _linear_taps(at: Any, n: Any) -> list[tuple[Any, Any]]:
    xp = np if isinstance(at, np.ndarray) and isinstance(n, int) else jnp
    at = xp.maximum(at, 0)
    low = xp.minimum(at.astype("int32"), n - 1)
    high = xp.minimum(low + 1, n - 1)
    part = xp.clip(at - low.astype(at.dtype), 0, 1)
    return [(low, 1 - part), (high, part)]


def _cubic_taps(at: Any, n: Any) -> list[tuple[Any, Any]]:
    xp = np if isinstance(at, np.ndarray) and isinstance(n, int) else jnp
    low = xp.floor(at)
    t = at - low
    start = low.astype("int32") - 1
    weights = cubic_weights(t)
    return [(xp.clip(start + i, 0, n - 1), weight) for i, weight in enumerate(weights)]


def cubic_weights(t: Any, a: float = -0.75) -> list[Any]:
    """Returns the weights of the four neighbours of a point that is t behind the second."""

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _smooth(
    x: Any, sizes: Sequence[Any], scales: Scales, align_corners: bool, taps: Any
) -> jax.Array:
    """Interpolates along each dimension in turn; halves in float32."""
    if not is_floating(x):
        raise ConversionError(
            f"interpolation of {x.dtype.name} rounds as torch's own fixed-point code does, which "
            "is not reproduced; cast to float32 before it and round after it"
        )
    dtype = x.dtype
    y = x.astype(wide(dtype))
    first = x.ndim - len(sizes)
    order = range(len(sizes) - 1, -1, -1)
    for i in order:
        n = x.shape[first + i]
        if isinstance(n, int) and n == sizes[i] and scales[i] in (None, 1.0):
            continue  # every weight is one
        at = _positions(n, sizes[i], align_corners, scales[i], _precision(x))
        y = _blend(y, first + i, taps(at, n))
    return y.astype(dtype)


def _enter_smooth(name: str, taps: Any) -> None:
    @lowering(f"aten::{name}.vec")
    def by_vector(x: Any, output_size: Any, align_corners: bool, scale_factors: Any) -> jax.Array:
        return _smooth(x, *_sizes(x, output_size, scale_factors), align_corners, taps)

    @lowering(f"aten::{name}.default")
    def by_size(x: Any, output_size: Any, align_corners: bool, *scales: Any) -> jax.Array:
        return _smooth(x, output_size, _pad(scales, len(output_size)), align_corners, taps)


_enter_smooth("upsample_linear1d", _linear_taps)
_enter_smooth("upsample_bilinear2d", _linear_taps)
_enter_smooth("upsample_trilinear3d", _linear_taps)
_enter_smooth("upsample_bicubic2d", _cubic_taps)


def _triangle(x: Any) -> Any:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: Any, a: float = -0.5) -> Any:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: Any) -> Any:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _antialiased_weights(
    n: int, m: int, align_corners: bool, scale: float | None, filter_: Any, size: int
) -> Any:
    """Returns the matrix (m, n) that resizes a row with a filter as wide as an output pixel."""
    step = float(_step(n, m, align_corners, scale, "float32"))
    support = size * 0.5 * max(step, 1.0)
    shrink = 1 / step if step >= 1 else 1.0
    weights = np.zeros((m, n))
    for i in range(m):
        centre = step * (i + 0.5)
        first = max(int(centre - support + 0.5), 0)
        last = min(int(centre + support + 0.5), n)
        row = filter_((np.arange(first, last) - centre + 0.5) * shrink)
        total = row.sum()
        weights[i, first:last] = row / total if total != 0 else row
    return weights


def _enter_antialiased(name: str, filter_: Any, size: int) -> None:
    def resize(x: Any, sizes: Sequence[Any], scales: Scales, align_corners: bool) -> jax.Array:
        if not is_floating(x):
            raise ConversionError(
                f"antialiased interpolation of {x.dtype.name} is not supported: cast to float32 "
                f"first"
            )
        y = x.astype(wide(x.dtype))
        for dim in (3, 2):
            n, m, scale = x.shape[dim], sizes[dim - 2], scales[dim - 2]
            weights = _antialiased_weights(n, m, align_corners, scale, filter_, size)
            y = jnp.moveaxis(
                jnp.tensordot(y, jnp.asarray(weights, y.dtype), ((dim,), (1,))), -1, dim
            )
        return y.astype(x.dtype)

    @lowering(f"aten::{name}.vec")
    def by_vector(x: Any, output_size: Any, align_corners: bool, scale_factors: Any) -> jax.Array:
        return resize(x, *_sizes(x, output_size, scale_factors), align_corners)

    @lowering(f"aten::{name}.default")
    def by_size(
        x: Any, output_size: Any, align_corners: bool, scales_h: Any = None, scales_w: Any = None
    ) -> jax.Array:
        return resize(x, output_size, (scales_h, scales_w), align_corners)


_enter_antialiased("_upsample_bilinear2d_aa", _triangle, 2)
_enter_antialiased("_upsample_bicubic2d_aa", _cubic, 4)
_enter_antialiased("_upsample_lanczos2d_aa", _lanczos, 6)
