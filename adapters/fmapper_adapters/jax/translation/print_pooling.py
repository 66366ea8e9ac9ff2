"""Pooling and images of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from fmapper.translation import Printing, Value, expr
from fmapper_adapters.jax.translation.promotion import call_of, is_float, is_half, is_number, method
from fmapper_adapters.jax.translation.table import prints

_LARGEST = 64  # sizes of windows that XLA still takes quickly


def _each(value: Any, count: int) -> tuple[Any, ...]:
    values = value if isinstance(value, tuple) else (value,)
    return values * count if len(values) == 1 else values


def _same(values: tuple[Any, ...]) -> Any:
    """Returns the one number for all dimensions; None for zeros, the default padding."""
    if len(set(values)) > 1:
        return values
    return None if is_number(values[0], 0) else values[0]


def _reaches_beyond(x: Value, window: Any, padding: Any) -> bool:
    """Returns whether windows may be as large as the image, which is slow in XLA."""
    sizes = x.shape[x.ndim - len(window) :]
    return any(
        isinstance(size, int) and k >= size + p
        for size, k, p in zip(sizes, window, padding, strict=True)
    )


@prints("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices")
def max_pool(
    p: Printing,
    x: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    """Prints `max_pool(x, window, strides, padding)`, a function in the file."""
    count = 3 if "3d" in p.call.op else 2
    if p.picked != frozenset({0}) or not is_float(x.dtype) or set(_each(dilation, count)) != {1}:
        return None
    window, padding = _each(kernel_size, count), _each(padding, count)
    if max(window) > _LARGEST:
        return None
    strides = window if stride == () else _each(stride, count)
    found = call_of(
        "max_pool", x, window, strides, padding=_same(padding), ceil_mode=ceil_mode or None
    )
    return expr("({0}, None)", found)


@prints("aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d")
def avg_pool(
    p: Printing,
    x: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Prints `avg_pool(x, window, strides, padding)`, a function in the file."""
    count = len(kernel_size) if isinstance(kernel_size, tuple) else int(p.call.op[14])
    window, padding = _each(kernel_size, count), _each(padding, count)
    is_padded = set(padding) != {0}
    if divisor_override is not None or not is_float(x.dtype) or is_half(x.dtype):
        return None
    if _reaches_beyond(x, window, padding) or (ceil_mode and is_padded and count_include_pad):
        return None
    strides = window if stride == () else _each(stride, count)
    return call_of(
        "avg_pool", x, window, strides,
        padding=_same(padding),
        ceil_mode=ceil_mode or None,
        count_padding=False if is_padded and not count_include_pad else None,
    )  # fmt: skip


@prints("aten::adaptive_avg_pool1d", "aten::adaptive_avg_pool2d", "aten::adaptive_avg_pool3d",
        "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d")  # fmt: skip
def adaptive_avg_pool(p: Printing, x: Value, output_size: Any) -> Any:
    """Prints `x.mean(axis=(-2, -1), keepdims=True)` for one bin."""
    sizes = output_size if isinstance(output_size, tuple) else (output_size,)
    if is_half(x.dtype) or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    axes = tuple(range(-len(sizes), 0))
    if set(sizes) == {1}:
        return method(x, "mean", axis=axes if len(axes) > 1 else -1, keepdims=True)
    if tuple(sizes) == tuple(x.shape[x.ndim - len(sizes) :]):
        return x
    return call_of("adaptive_avg_pool", x, tuple(sizes))


@prints("aten::adaptive_max_pool1d", "aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d")
def adaptive_max_pool(p: Printing, x: Value, output_size: Any) -> Any:
    """Prints `largest(x, axis=(-2, -1), keepdims=True)` for a bin whose place nothing reads."""
    sizes = output_size if isinstance(output_size, tuple) else (output_size,)
    if set(sizes) != {1} or p.picked != frozenset({0}):
        return None
    axes = tuple(range(-len(sizes), 0))
    found = call_of("largest", x, axis=axes if len(axes) > 1 else -1, keepdims=True)
    return expr("({0}, None)", found)


def _factors(x: Value, p: Printing, scales: Any) -> tuple[int, ...] | None:
    """Returns the integer factors by which an image grows; None for others."""
    flat = [s for one in scales for s in (one if isinstance(one, tuple) else (one,))]
    if not all(scale is None or float(scale).is_integer() for scale in flat):
        return None
    found = []
    sizes = zip(x.shape[2:], p.shape[2:], strict=True)
    for (before, after), scale in zip_longest(sizes, flat[: x.ndim - 2]):
        if before == after:
            found.append(1)
        elif not isinstance(before, int) or not isinstance(after, int):
            if scale is None:
                return None
            found.append(int(scale))
        elif not before or after % before:
            return None
        else:
            found.append(after // before)
    return tuple(found)


def _enter_nearest(name: str) -> None:
    @prints(f"aten::{name}")
    def nearest(p: Printing, x: Value, output_size: Any = None, *scales: Any) -> Any:
        factors = _factors(x, p, scales)
        if factors is None and "exact" not in name and not _are_scaled(scales):
            is_known = x.dtype == "float32" and output_size is not None
            sizes = tuple(p.size(size) for size in p.shape[2:])
            return call_of("resize_nearest", x, sizes) if is_known else None
        if factors is None:
            return None
        node: Any = x
        for axis, factor in enumerate(factors, 2):
            node = node if factor == 1 else method(node, "repeat", factor, axis=axis)
        return node


for _name in ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
              "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"):  # fmt: skip
    _enter_nearest(_name)


@prints("aten::upsample_bilinear2d", "aten::upsample_linear1d", "aten::upsample_trilinear3d")
def linear(p: Printing, x: Value, output_size: Any, align_corners: bool, *scales: Any) -> Any:
    """Prints `jax.image.resize(x, shape, "linear", antialias=False)`."""
    if align_corners or not is_float(x.dtype) or is_half(x.dtype):
        return None
    if _factors(x, p, scales) is None and _are_scaled(scales):
        return None  # the factor counts, not the sizes
    if tuple(x.shape) == tuple(p.shape):
        return x
    shape: Sequence[Any] = [p.size(size) for size in p.shape]
    return call_of("jax.image.resize", x, tuple(shape), "linear", antialias=False)


def _are_scaled(scales: Any) -> bool:
    flat = [s for one in scales for s in (one if isinstance(one, tuple) else (one,))]
    return any(scale is not None for scale in flat)
