"""Convolution, in torch's order of dimensions: batch, channels, space."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fmapper_adapters.jax.aten.table import dimensions, lowering
from fmapper_adapters.jax.aten.types import cast

Sizes = Sequence[int]


@lowering(
    "aten::conv1d.default",
    "aten::conv2d.default",
    "aten::conv3d.default",
    dims=dimensions.convolution,
)
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


@lowering(
    "aten::conv1d.padding",
    "aten::conv2d.padding",
    "aten::conv3d.padding",
    dims=dimensions.convolution,
)
def convolve_padded(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = (1,),
    padding: str = "valid",
    dilation: Sizes = (1,),
    groups: int = 1,
) -> jax.Array:
    """Convolves with padding that keeps the size ("same", an odd element last), or without."""
    count = weight.ndim - 2
    widths = [(0, 0)] * count
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(_each(dilation, count), weight.shape[2:], strict=True)]
        widths = [(r // 2, r - r // 2) for r in reach]
    return _correlate(x, weight, bias, stride, widths, dilation, groups)


@lowering("aten::convolution", "aten::convolution_overrideable", dims=dimensions.convolution)
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
    function = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=stride,
        padding=widths,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=(f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
        feature_group_count=groups,
    )
    if groups > 1 and jax.device_count() > 1:
        function = _with_own_derivative(function, stride, widths, dilation, groups, spread)
    return _with_bias(function(x, weight), bias, batched=batched)


def _with_own_derivative(
    function: Any,
    stride: Sizes,
    widths: Sequence[tuple[Any, Any]],
    dilation: Sizes,
    groups: int,
    spread: Sizes,
) -> Any:
    """Returns a grouped convolution whose weight gradient is computed per kernel element.

    XLA computes that derivative as a convolution with groups in the batch. If the batch is divided
    along only some axes of a mesh, it multiplies the derivative by the sizes of the others (seen
    with jaxlib 0.10.2).
    """
    convolve = jax.custom_jvp(function)

    def by_weight(x: Any, weight: Any) -> Any:
        out, each, *kernel = weight.shape
        edges = [(low, high, apart - 1) for (low, high), apart in zip(widths, spread, strict=True)]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *edges])
        batch, _, *space = x.shape
        sizes = [
            (n - d * (k - 1) - 1) // step + 1
            for n, k, d, step in zip(space, kernel, dilation, stride, strict=True)
        ]
        x = x.reshape(batch, groups, each, *space)
        weight = weight.reshape(groups, out // groups, each, *kernel)
        total: Any = None
        for place in itertools.product(*map(range, kernel)):
            starts = [i * d for i, d in zip(place, dilation, strict=True)]
            ends = [
                start + (n - 1) * step + 1
                for start, n, step in zip(starts, sizes, stride, strict=True)
            ]
            seen = jax.lax.slice(
                x, (0, 0, 0, *starts), (batch, groups, each, *ends), (1, 1, 1, *stride)
            )
            part = jnp.einsum("bgi...,goi->bgo...", seen, weight[(..., *place)])
            total = part if total is None else total + part
        return total.reshape(batch, out, *sizes)

    def derivative(primals: Any, tangents: Any) -> Any:
        (x, weight), (dx, dw) = primals, tangents
        parts = []
        if not isinstance(dx, SymbolicZero):
            parts.append(function(dx, weight))
        if not isinstance(dw, SymbolicZero):
            parts.append(by_weight(x, dw))
        return convolve(x, weight), sum(parts[1:], parts[0])

    convolve.defjvp(derivative, symbolic_zeros=True)
    return convolve


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
