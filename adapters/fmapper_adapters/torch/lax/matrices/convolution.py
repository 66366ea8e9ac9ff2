"""Convolutions in all layouts, also transposed ones and those of integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fmapper import ConversionError
from fmapper.programs import DType
from fmapper_adapters.torch.lax.layout.dims import are_equal, inverse, permute, product
from fmapper_adapters.torch.lax.layout.shapes import pad_with
from fmapper_adapters.torch.lax.matrices.products import cast_result, round_operand, widen
from fmapper_adapters.torch.lax.table import Avals, dimensions, lax
from fmapper_adapters.torch.model.emit import current

_FORWARD = {
    1: torch.nn.functional.conv1d,
    2: torch.nn.functional.conv2d,
    3: torch.nn.functional.conv3d,
}
_TRANSPOSED = {
    1: torch.nn.functional.conv_transpose1d,
    2: torch.nn.functional.conv_transpose2d,
    3: torch.nn.functional.conv_transpose3d,
}
_LIMB = 16  # bits of a limb of an integer: its products and sums fit into float64


@lax("conv_general_dilated", takes_avals=True, dims=dimensions.convolution)
def conv_general_dilated(
    x: Any,
    kernel: Any,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    avals: Avals,
) -> Any:
    """Returns a convolution of batch, features and up to three dimensions of space.

    Raises:
        ConversionError: There are more spatial dimensions.
    """
    rank = len(window_strides)
    if rank > 3:
        raise ConversionError(
            f"a convolution over {rank} dimensions, but torch supports at most 3. Sum "
            f"3-dimensional convolutions over the kernel positions of the others"
        )
    x = permute(x, dimension_numbers["lhs_spec"])
    kernel = permute(kernel, dimension_numbers["rhs_spec"])
    groups = feature_group_count
    if batch_group_count > 1:  # parts of the batch become groups of features
        groups = batch_group_count
        x = x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)
    numbers = window_strides, padding, lhs_dilation, rhs_dilation
    if rank == 0:
        x, kernel = x.unsqueeze(2), kernel.unsqueeze(2)
        numbers = (1,), ((0, 0),), (1,), (1,)

    def convolve(a: Any, b: Any) -> Any:
        return _convolve(a, b, *numbers, groups)

    depth = product(kernel.shape[1:])
    x, kernel = round_operand(x, precision), round_operand(kernel, precision)
    dtype = current().dtype(avals.results[0][0])
    if _is_wide_integer(dtype) and _is_wide_integer(x.dtype):
        names = [name for name, _ in avals.operands]
        result = _in_limbs(
            convolve, widen(x, names[0]).to(dtype), widen(kernel, names[1]).to(dtype)
        )
    elif dtype.is_complex:  # complex products have the precision of the operands
        result = convolve(x, kernel).to(dtype)
    else:
        result = cast_result(convolve, x, kernel, depth, avals, False)
    if rank == 0:
        result = result.squeeze(2)
    return permute(result, inverse(dimension_numbers["out_spec"]))


def _is_wide_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 2


def _in_limbs(convolve: Any, x: Any, kernel: Any) -> Any:
    """Convolves integers exactly, in limbs that float64 can hold."""
    dtype = x.dtype
    count = dtype.itemsize * 8 // _LIMB
    mask = (1 << _LIMB) - 1
    xs, kernels = (
        [((a >> (_LIMB * i)) & mask).to(torch.float64) for i in range(count)] for a in (x, kernel)
    )
    total: Any = None
    for i in range(count):
        for j in range(count - i):
            part = convolve(xs[i], kernels[j]).to(torch.int64) << (_LIMB * (i + j))
            total = part if total is None else total + part
    return total if dtype is torch.int64 else total.to(dtype)


def _convolve(
    x: Any,
    kernel: Any,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    x_dilation: Sequence[int],
    kernel_dilation: Sequence[int],
    groups: int,
) -> Any:
    """Returns a convolution of (batch, features, *space) with (features, features, *space)."""
    rank = len(strides)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel.shape[2:], kernel_dilation, strict=True)]
    lengths = [
        (n - 1) * d + 1 + low + high if not are_equal(n, 0) else low + high
        for n, d, (low, high) in zip(x.shape[2:], x_dilation, padding, strict=True)
    ]
    if any(
        isinstance(n, int) and isinstance(s, int) and n < s
        for n, s in zip(lengths, spans, strict=True)
    ) or 0 in (*x.shape, *kernel.shape):
        return _without_places(x, kernel, strides, spans, lengths)
    if all(d == 1 for d in x_dilation):
        equal = all(are_equal(low, high) and _is_natural(low) for low, high in padding)
        if not equal:
            x = pad_with(x, 0, [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in padding)])
        amount: Any = [low if equal else 0 for low, _ in padding]
        return _FORWARD[rank](x, kernel, None, list(strides), amount, list(kernel_dilation), groups)
    return _transpose(x, kernel, strides, padding, x_dilation, kernel_dilation, spans, groups)


def _is_natural(size: Any) -> bool:
    """Returns whether a size is provably not negative."""
    return isinstance(size, int) and size >= 0


def _without_places(x: Any, kernel: Any, strides: Any, spans: Any, lengths: Any) -> Any:
    """Returns the result of a convolution without terms or without outputs."""
    space = [
        max((n - s) // step + 1, 0) for n, s, step in zip(lengths, spans, strides, strict=True)
    ]
    nothing = x.sum() * 0 + kernel.sum() * 0
    return nothing.expand((x.shape[0], kernel.shape[0], *space))


def _transpose(
    x: Any,
    kernel: Any,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    x_dilation: Sequence[int],
    kernel_dilation: Sequence[int],
    spans: Sequence[int],
    groups: int,
) -> Any:
    """Convolves a dilated input, by torch's transposed convolution.

    It adds the flipped kernel at every element, which corresponds to full padding. Less padding is
    cropped from the result, more is added at its ends.
    """
    rank = len(strides)
    if groups > 1:
        weight = kernel.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    else:
        weight = kernel.transpose(0, 1)
    turned = _flip(weight, [d for d in range(2, rank + 2) if not are_equal(weight.shape[d], 1)])
    cut, added, left = [], [], []
    for (low, high), span, step, dilation in zip(
        padding, spans, x_dilation, kernel_dilation, strict=True
    ):
        front, back = span - 1 - low, span - 1 - high  # cropped from full padding
        more = front - back
        if _is_natural(front) and _is_natural(more) and more < max(step, dilation):
            cut.append(front)
            added.append(more)
            left.append((0, 0))
        else:
            cut.append(0)
            added.append(0)
            left.append((-front, -back))
    result = _TRANSPOSED[rank](
        x, turned, None, list(x_dilation), cut, added, groups, list(kernel_dilation)
    )
    if any(ends != (0, 0) for ends in left):
        result = pad_with(
            result, 0, [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in left)]
        )
    if any(step != 1 for step in strides):
        result = result[(slice(None), slice(None), *(slice(None, None, s) for s in strides))]
    return result


def _flip(x: Any, dims: list[int]) -> Any:
    return torch.flip(x, dims) if dims else x
