"""Operations on the bits of integers."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax.pointwise.numbers import (
    as_tensor,
    is_number,
    lowest,
    shift_right,
    tensor_first,
    widen,
)
from fmapper_adapters.torch.lax.table import Avals, lax, pointwise
from fmapper_adapters.torch.lax.types import bits_of


@lax("and", takes_numbers=True, dims=pointwise)
def bitwise_and(x: Any, y: Any) -> Any:
    x, y = tensor_first(x, y)
    return x & y


@lax("or", takes_numbers=True, dims=pointwise)
def bitwise_or(x: Any, y: Any) -> Any:
    x, y = tensor_first(x, y)
    return x | y


@lax("xor", takes_numbers=True, dims=pointwise)
def bitwise_xor(x: Any, y: Any) -> Any:
    x, y = tensor_first(x, y)
    return x ^ y


@lax("not", dims=pointwise)
def bitwise_not(x: Any) -> Any:
    return ~x


@lax("shift_left", takes_numbers=True)
def shift_left(x: Any, y: Any) -> Any:
    x = as_tensor(x, y)
    if is_number(y) and not 0 <= y < bits_of(x.dtype):
        return torch.zeros_like(x)
    return x << y


@lax("shift_right_arithmetic", takes_numbers=True, takes_avals=True)
def shift_right_arithmetic(x: Any, y: Any, *, avals: Avals) -> Any:
    """Shifts right and fills with the sign, also in unsigned integers."""
    x = as_tensor(x, y)
    if avals.results[0][0] == "uint8":
        count = (8 if y > 7 else y) if is_number(y) else y.to(torch.int16)
        return (x.view(torch.int8).to(torch.int16) >> count).to(torch.uint8)
    if is_number(y) and not 0 <= y < bits_of(x.dtype):
        y = bits_of(x.dtype) - 1
    return x >> y


@lax("shift_right_logical", takes_numbers=True)
def shift_right_logical(x: Any, y: Any) -> Any:
    """Shifts right and fills with zeros."""
    x = as_tensor(x, y)
    dtype, bits = x.dtype, bits_of(x.dtype)
    if is_number(y):
        return shift_right(x, y) if 0 <= y < bits else torch.zeros_like(x)
    if dtype is torch.uint8:
        return x >> y
    if bits < 64:
        wide = torch.int64 if bits == 32 else torch.int32
        return (widen(x, wide, bits) >> y.to(wide)).to(dtype)
    halved = (x >> 1) & ~lowest(dtype)
    return torch.where(y == 0, x, halved >> (y - 1))


@lax("population_count")
def population_count(x: Any) -> Any:
    return _ones(x).to(x.dtype)


@lax("clz")
def count_leading_zeros(x: Any) -> Any:
    bits = bits_of(x.dtype)
    wide = x if bits >= 32 else widen(x, torch.int32, bits)
    step = 1
    while step < bits:  # all bits below the highest one are set
        wide = wide | shift_right(wide, step)
        step *= 2
    return (bits - _ones(wide)).to(x.dtype)


def _ones(x: Any) -> Any:
    """Counts the bits that are set, by pairwise sums."""
    bits = bits_of(x.dtype)
    if bits < 32:
        x, bits = widen(x, torch.int32, bits), 32
    pairs, fours, eights, units = (int(byte * (bits // 8), 16) for byte in ("55", "33", "0f", "01"))
    x = x - ((x >> 1) & pairs)
    x = (x & fours) + ((x >> 2) & fours)
    x = (x + (x >> 4)) & eights
    return ((x * units) >> (bits - 8)) & 0xFF
