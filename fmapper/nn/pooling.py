"""Pools windows: their maximum or their mean."""

from __future__ import annotations

from typing import Any

from fmapper.nn.arguments import Ints, check_windows, floating_kernels, kernels, shape_error, sizes


def max_pool1d(x: Any, kernel_size: Ints, stride: Any = None, padding: Ints = 0) -> Any:
    """Returns the largest element of each window of one dimension; see `max_pool2d`."""
    return _pool("max_pool1d", 1, x, kernel_size, stride, padding)


def max_pool2d(x: Any, kernel_size: Ints, stride: Any = None, padding: Ints = 0) -> Any:
    """Returns the largest element of each window.

    Args:
        x: Of shape (batch, channels, height, width) or (channels, height, width).
        kernel_size: The window: an integer, or one per dimension.
        stride: The step of the window; None for the size of the window.
        padding: The padding around x, with the lowest value of its dtype; at most half of the
            window.

    Returns:
        Of shape (batch, channels, new height, new width). Windows that do not fit are left out. The
        gradient flows to the first of several equal elements.
    """
    return _pool("max_pool2d", 2, x, kernel_size, stride, padding)


def max_pool3d(x: Any, kernel_size: Ints, stride: Any = None, padding: Ints = 0) -> Any:
    """Returns the largest element of each window of three dimensions; see `max_pool2d`."""
    return _pool("max_pool3d", 3, x, kernel_size, stride, padding)


def avg_pool1d(
    x: Any,
    kernel_size: Ints,
    stride: Any = None,
    padding: Ints = 0,
    *,
    count_include_pad: bool = True,
) -> Any:
    """Returns the mean of each window of one dimension; see `avg_pool2d`."""
    return _pool("avg_pool1d", 1, x, kernel_size, stride, padding, count_include_pad)


def avg_pool2d(
    x: Any,
    kernel_size: Ints,
    stride: Any = None,
    padding: Ints = 0,
    *,
    count_include_pad: bool = True,
) -> Any:
    """Returns the mean of each window.

    Args:
        x: Of shape (batch, channels, height, width) or (channels, height, width).
        kernel_size: The window: an integer, or one per dimension.
        stride: The step of the window; None for the size of the window.
        padding: The zeros around x: at most half of the window.
        count_include_pad: Whether these zeros count as elements.

    Returns:
        Of shape (batch, channels, new height, new width).
    """
    return _pool("avg_pool2d", 2, x, kernel_size, stride, padding, count_include_pad)


def avg_pool3d(
    x: Any,
    kernel_size: Ints,
    stride: Any = None,
    padding: Ints = 0,
    *,
    count_include_pad: bool = True,
) -> Any:
    """Returns the mean of each window of three dimensions; see `avg_pool2d`."""
    return _pool("avg_pool3d", 3, x, kernel_size, stride, padding, count_include_pad)


def _pool(
    function: str,
    count: int,
    x: Any,
    kernel_size: Ints,
    stride: Any,
    padding: Ints,
    count_include_pad: bool | None = None,
) -> Any:
    functional = (kernels if count_include_pad is None else floating_kernels)(function, x)
    rank = len(x.shape)
    if not count < rank <= count + 2:
        raise shape_error(function, f"x (batch, channels, {count} sizes)", x=x)
    window = sizes(function, "kernel_size", kernel_size, count)
    step = window if stride is None else sizes(function, "stride", stride, count)
    around = sizes(function, "padding", padding, count, least=0)
    if any(p > k // 2 for p, k in zip(around, window, strict=True)):
        raise ValueError(f"{function}: padding={around} is more than half of kernel_size={window}")
    check_windows(function, x, window, tuple([(p, p) for p in around]))
    batched = x if rank == count + 2 else x[None]
    if count_include_pad is None:
        out = functional.max_pool(batched, window, step, around)
    else:
        out = functional.avg_pool(batched, window, step, around, count_include_pad)
    return out if rank == count + 2 else out[0]
