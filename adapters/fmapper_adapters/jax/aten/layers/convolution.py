"""Convolution, in torch's order of dimensions: batch, channels, space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import cast

Sizes = Sequence[int]


@lowering("aten::conv1d.default", "aten::conv2d.default", "aten::conv3d.default")
def convolve(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = (1,),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    groups: int = 1,
) -> jax.Array:
    """Returns cross-correlation of x (batch, in, ...) with weight (out, in / groups, ...)."""
    padding = _each(padding, weight.ndim - 2)
    return _correlate(x, weight, bias, stride, [(p, p) for p in padding], dilation, groups)


@lowering("aten::conv1d.padding", "aten::conv2d.padding", "aten::conv3d.padding")
def convolve_padded(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = (1,),
    padding: str = "valid",
    dilation: Sizes = (1,),
    groups: int = 1,
) -> jax.Array:
    """Convolves with as much padding as keeps the size ("same", the odd one last), or none."""
    count = weight.ndim - 2
    widths = [(0, 0)] * count
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(_each(dilation, count), weight.shape[2:], strict=True)]
        widths = [(r // 2, r - r // 2) for r in reach]
    return _correlate(x, weight, bias, stride, widths, dilation, groups)


@lowering("aten::convolution", "aten::convolution_overrideable")
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> jax.Array:
    """Returns cross-correlation or, transposed, its adjoint."""
    if transposed:
        return convolve_transposed(
            x, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return convolve(x, weight, bias, stride, padding, dilation, groups)


@lowering("aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d")
def convolve_transposed(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = (1,),
    padding: Sizes = (0,),
    output_padding: Sizes = (0,),
    groups: int = 1,
    dilation: Sizes = (1,),
) -> jax.Array:
    """Returns the adjoint of cross-correlation with weight (in, out / groups, ...)."""
    count = weight.ndim - 2
    sizes = (_each(v, count) for v in (stride, padding, output_padding, dilation))
    stride, padding, output_padding, dilation = sizes
    channels, each, *kernel = weight.shape
    w = weight.reshape(groups, channels // groups, each, *kernel)
    w = jnp.swapaxes(w, 1, 2).reshape(groups * each, channels // groups, *kernel)
    w = jnp.flip(w, tuple(range(2, w.ndim)))
    widths = []
    for k, p, more, d in zip(kernel, padding, output_padding, dilation, strict=True):
        reach = d * (k - 1)
        widths.append((reach - p, reach - p + more))
    return _correlate(x, w, bias, (1,), widths, dilation, groups, spread=stride)


def _correlate(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sizes,
    widths: Sequence[tuple[Any, Any]],
    dilation: Sizes,
    groups: int,
    *,
    spread: Sizes = (1,),
) -> jax.Array:
    count = weight.ndim - 2
    batched = x.ndim == weight.ndim
    x = cast(x if batched else x[None], weight.dtype)
    stride, dilation, spread = (_each(v, count) for v in (stride, dilation, spread))
    spatial = "DHW"[3 - count :]
    y = jax.lax.conv_general_dilated(
        x,
        weight,
        window_strides=stride,
        padding=widths,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=(f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
        feature_group_count=groups,
    )
    return _with_bias(y, bias, batched=batched)


def _with_bias(y: Any, bias: Any, *, batched: bool) -> jax.Array:
    if bias is not None:
        y = y + cast(bias, y.dtype).reshape(1, -1, *(1,) * (y.ndim - 2))
    return y if batched else y[0]


@lowering("aten::conv_tbc")
def convolve_time_batch_channels(x: Any, weight: Any, bias: Any, pad: int = 0) -> jax.Array:
    """Convolves x (time, batch, in) with weight (kernel, in, out)."""
    y = jax.lax.conv_general_dilated(
        x, cast(weight, x.dtype), (1,), [(pad, pad)], dimension_numbers=("WNC", "WIO", "WNC")
    )
    return y + cast(bias, y.dtype)


def _each(value: Any, count: int) -> tuple[int, ...]:
    """Returns one number per spatial dimension, given one for all or one for each."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * count if len(values) == 1 else values
