"""Convolution, in torch's order of dimensions: batch, channels, space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from fmapper_adapters.jax.aten._table import lowering
from fmapper_adapters.jax.aten._types import cast


@lowering("aten::conv1d.default", "aten::conv2d.default", "aten::conv3d.default")
def convolve(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> jax.Array:
    """Cross-correlation of x (batch, in, ...) with weight (out, in / groups, ...)."""
    count = weight.ndim - 2
    batched = x.ndim == weight.ndim
    x = cast(x if batched else x[None], weight.dtype)
    stride, padding, dilation = (_each(v, count) for v in (stride, padding, dilation))
    spatial = "DHW"[-count:]
    y = jax.lax.conv_general_dilated(
        x,
        weight,
        window_strides=stride,
        padding=[(p, p) for p in padding],
        rhs_dilation=dilation,
        dimension_numbers=(f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
        feature_group_count=groups,
    )
    if bias is not None:
        y = y + cast(bias, y.dtype).reshape(1, -1, *(1,) * count)
    return y if batched else y[0]


def _each(value: Any, count: int) -> tuple[int, ...]:
    """One number per spatial dimension; a single one stands for all."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * count if len(values) == 1 else values
