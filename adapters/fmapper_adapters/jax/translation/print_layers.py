"""Layers as functions: normalisation and convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmapper.translation import Printing, Value
from fmapper_adapters.jax.translation.promotion import call_of, convert, is_float, is_number
from fmapper_adapters.jax.translation.table import prints


@prints("aten::layer_norm")
def layer_norm(
    p: Printing,
    x: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Prints `layer_norm(x, ...)`, a function in the file."""
    axes = None if len(normalized_shape) == 1 else len(normalized_shape)
    return call_of("layer_norm", x, axes=axes, weight=weight, bias=bias, eps=_unless(eps, 1e-5))


@prints("aten::rms_norm")
def rms_norm(
    p: Printing,
    x: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    eps: float | None = None,
) -> Any:
    """Prints `rms_norm(x, ...)`, a function in the file."""
    axes = None if len(normalized_shape) == 1 else len(normalized_shape)
    return call_of("rms_norm", x, axes=axes, weight=weight, eps=eps)


@prints("aten::group_norm")
def group_norm(
    p: Printing,
    x: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Prints `group_norm(x, groups, ...)`, a function in the file."""
    return call_of("group_norm", x, num_groups, weight=weight, bias=bias, eps=_unless(eps, 1e-5))


@prints("aten::conv1d.default", "aten::conv2d.default", "aten::conv3d.default")
def conv(
    p: Printing,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = (1,),
    padding: Any = (0,),
    dilation: Any = (1,),
    groups: int = 1,
) -> Any:
    """Prints `conv(x, weight, bias, ...)`, a function in the file."""
    if x.ndim != weight.ndim or not is_float(x.dtype):
        return None
    return call_of(
        "conv",
        convert(x, weight.dtype),
        weight,
        bias=None if bias is None else convert(bias, weight.dtype),
        stride=_unless(stride, 1),
        padding=_unless(padding, 0),
        dilation=_unless(dilation, 1),
        groups=None if is_number(groups, 1) else groups,
    )


def _unless(value: Any, usual: float) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return None if all(is_number(v, usual) for v in values) else value
