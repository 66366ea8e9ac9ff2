"""Convolutions and their transposes."""

from __future__ import annotations

from typing import Any

from fmapper.nn.arguments import Ints, Padding, check_windows, common, pads, shape_error, sizes


def conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Any:
    """Convolves over one dimension; see `conv2d`.

    Args:
        x: Of shape (batch, in, length) or (in, length).
        weight: Of shape (out, in / groups, width).
        bias: Of shape (out,).
        stride: Step of the window.
        padding: As for `conv2d`.
        dilation: Step between the elements of the window.
        groups: The number of groups of channels that are convolved separately.
    """
    return _conv("conv1d", 1, x, weight, bias, stride, padding, dilation, groups)


def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Any:
    """Convolves over two dimensions, as neural networks define it: the kernel is not flipped.

    Args:
        x: Of shape (batch, in, height, width) or (in, height, width).
        weight: Of shape (out, in / groups, kernel height, kernel width).
        bias: Of shape (out,).
        stride: Step of the window: an integer, or one per dimension.
        padding: Zeros around x: an integer, one per dimension, a pair (before, after) per
            dimension, "valid" for none, or "same" for as many as keep the size at stride 1 (the odd
            one after).
        dilation: Step between the elements of the window.
        groups: The number of groups of channels that are convolved separately.

    Returns:
        Of shape (batch, out, new height, new width), without batch if x has none.

    Examples:
        >>> import numpy as np
        >>> from fmapper.nn import functional as F
        >>> x, weight = np.ones((1, 3, 8, 8)), np.ones((6, 3, 5, 5))
        >>> F.conv2d(x, weight, padding="same").shape
        (1, 6, 8, 8)
    """
    return _conv("conv2d", 2, x, weight, bias, stride, padding, dilation, groups)


def conv3d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Any:
    """Convolves over three dimensions; see `conv2d`.

    Args:
        x: Of shape (batch, in, depth, height, width) or without batch.
        weight: Of shape (out, in / groups, three sizes of the kernel).
        bias: Of shape (out,).
        stride: Step of the window.
        padding: As for `conv2d`.
        dilation: Step between the elements of the window.
        groups: The number of groups of channels that are convolved separately.
    """
    return _conv("conv3d", 3, x, weight, bias, stride, padding, dilation, groups)


def _conv(
    function: str,
    count: int,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Ints,
    padding: Padding,
    dilation: Ints,
    groups: int,
) -> Any:
    functional = common(function, x, ("weight", weight), ("bias", bias))
    given, shape = tuple(x.shape), tuple(weight.shape)  # slices of a torch.Size are slow
    rank = len(given)
    if (
        not count < rank <= count + 2
        or len(shape) != count + 2
        or given[rank - count - 1] != shape[1] * groups
        or shape[0] % groups
    ):
        raise shape_error(
            function,
            f"x (batch, in, {count} sizes) and weight (out, in / {groups}, {count} sizes)",
            x=x,
            weight=weight,
        )
    if bias is not None and tuple(bias.shape) != (shape[0],):
        raise shape_error(function, "a bias (out,)", weight=weight, bias=bias)
    stride = sizes(function, "stride", stride, count)
    dilation = sizes(function, "dilation", dilation, count)
    padding = pads(function, padding, shape[2:], stride, dilation)
    for size, kernel, step, (low, high) in zip(
        given[-count:], shape[2:], dilation, padding, strict=True
    ):
        if size + low + high <= step * (kernel - 1):
            spread = [d * (k - 1) + 1 for d, k in zip(dilation, shape[2:], strict=True)]
            check_windows(function, x, spread, padding)
    if rank == count + 1:
        return functional.conv(x[None], weight, bias, stride, padding, dilation, groups)[0]
    return functional.conv(x, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Any:
    """Returns the transposed convolution over one dimension; see `conv_transpose2d`."""
    return _conv_transpose(
        "conv_transpose1d", 1, x, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Any:
    """Computes the transpose of the linear map `conv2d` with the same weight.

    Args:
        x: Of shape (batch, in, height, width) or (in, height, width).
        weight: Of shape (in, out / groups, kernel height, kernel width).
        bias: Of shape (out,).
        stride: Step of that convolution.
        padding: Padding of that convolution: an integer, or one per dimension.
        output_padding: The size to add at the end of each dimension, because a convolution
            with a stride drops the remainder of the size.
        groups: The number of groups of channels that are convolved separately.
        dilation: Step between the elements of the window.

    Returns:
        Of shape (batch, out, new height, new width), each size
        (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1.
    """
    return _conv_transpose(
        "conv_transpose2d", 2, x, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose3d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Any:
    """Returns the transposed convolution over three dimensions; see `conv_transpose2d`."""
    return _conv_transpose(
        "conv_transpose3d", 3, x, weight, bias, stride, padding, output_padding, groups, dilation
    )


def _conv_transpose(
    function: str,
    count: int,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
) -> Any:
    functional = common(function, x, ("weight", weight), ("bias", bias))
    rank, shape = len(x.shape), weight.shape
    if (
        not count < rank <= count + 2
        or len(shape) != count + 2
        or x.shape[rank - count - 1] != shape[0]
        or shape[0] % groups
    ):
        raise shape_error(
            function,
            f"x (batch, in, {count} sizes) and weight (in, out / {groups}, {count} sizes)",
            x=x,
            weight=weight,
        )
    if bias is not None and tuple(bias.shape) != (shape[1] * groups,):
        raise shape_error(function, "a bias (out,)", weight=weight, bias=bias)
    stride = sizes(function, "stride", stride, count)
    dilation = sizes(function, "dilation", dilation, count)
    padding = sizes(function, "padding", padding, count, least=0)
    extra = sizes(function, "output_padding", output_padding, count, least=0)
    if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        raise ValueError(
            f"{function}: output_padding={extra} must be less than stride={stride} or "
            f"dilation={dilation}"
        )
    spatial = x.shape[rank - count :]
    new = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, s, p, d, k, e in zip(
            spatial, stride, padding, dilation, shape[2:], extra, strict=True
        )
    ]
    if min(new) < 1:
        raise ValueError(f"{function}: padding={padding} leaves a result of sizes {tuple(new)}")
    args = (weight, bias, stride, padding, extra, groups, dilation)
    if rank == count + 1:
        return functional.conv_transpose(x[None], *args)[0]
    return functional.conv_transpose(x, *args)
