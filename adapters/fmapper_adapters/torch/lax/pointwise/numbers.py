"""JAX's arithmetic: unsigned integers carried as signed ones, division by zero, total order."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax.types import bits_of

Number = bool | int | float | complex


def is_number(x: Any) -> bool:
    """Returns whether an operand is a Python number rather than a tensor."""
    return isinstance(x, Number)


def tensor_first(x: Any, y: Any) -> tuple[Any, Any]:
    """Orders the operands of a commutative operation; a number comes last."""
    return (y, x) if is_number(x) else (x, y)


def as_tensor(x: Any, like: Any) -> Any:
    """Converts an operand to a tensor of the other operand's dtype."""
    return like.new_full((), x) if is_number(x) else x


def precedes(x: Any, y: Any) -> Any:
    """Returns where complex numbers are less than others: by real, then imaginary parts."""
    a, b = torch.real(x), torch.real(y)
    return torch.where(a == b, torch.imag(x) < torch.imag(y), a < b)


def total_order(x: Any) -> Any:
    """Maps floats to integers in JAX's total order: -NaN, -inf, ..., -0.0, 0.0, ..., NaN."""
    if not x.is_floating_point():
        return x
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    bits = x.view(dtype)
    return torch.where(bits < 0, bits ^ ~lowest(dtype), bits)


def lowest(dtype: torch.dtype) -> int:
    """Returns the smallest integer of a signed dtype, in which only the sign bit is set."""
    return int(torch.iinfo(dtype).min)


def flip_sign_bit(x: Any, dtype: torch.dtype) -> Any:
    """Maps carried unsigned integers to signed ones in the same order, and back."""
    return x ^ lowest(dtype)


def widen(x: Any, dtype: torch.dtype, bits: int) -> Any:
    """Widens carried unsigned integers, or the bits of signed ones."""
    mask = (1 << bits) - 1
    return x & mask if is_number(x) else x.to(dtype) & mask


def shift_right(x: Any, count: Any) -> Any:
    """Shifts the bits of a signed tensor right by a number, filling with zeros.

    Args:
        x: A tensor of signed integers or uint8.
        count: A Python integer from 0 to the number of bits less one.
    """
    if x.dtype is torch.uint8 or count == 0:
        return x >> count
    return (x >> count) & ((1 << (bits_of(x.dtype) - count)) - 1)


def unsigned_less(x: Any, y: Any, dtype: torch.dtype) -> Any:
    """Returns where carried unsigned integers are less than others."""
    return flip_sign_bit(x, dtype) < flip_sign_bit(y, dtype)


def quotient(x: Any, y: Any, dtype: torch.dtype, *, unsigned: bool) -> Any:
    """Divides integers towards zero: a divisor of zero sets all bits; overflow wraps."""
    if is_number(y):
        return _by_number(x, y, dtype, unsigned)
    x = as_tensor(x, y)
    if unsigned:
        result = _unsigned_quotient(x, y, dtype)
    elif dtype is torch.uint8:
        result = torch.div(x, y.clamp(min=1), rounding_mode="trunc")
        return torch.where(y == 0, 255, result)
    else:
        odd = (y == 0) | (y == -1)  # the lowest integer by -1 traps
        result = torch.div(x, torch.where(odd, 1, y), rounding_mode="trunc")
        result = torch.where(y == -1, -x, result)
    return torch.where(y == 0, -1, result)


def _by_number(x: Any, y: int, dtype: torch.dtype, unsigned: bool) -> Any:
    if y == 0:
        return torch.full_like(x, 255 if dtype is torch.uint8 else -1)
    if unsigned and (y < 0 or bits_of(dtype) == 64):
        return _unsigned_quotient(x, x.new_full((), y), dtype)
    if unsigned:
        wide = widen(x, torch.int64, bits_of(dtype))
        return torch.div(wide, y, rounding_mode="trunc").to(dtype)
    return -x if y == -1 else torch.div(x, y, rounding_mode="trunc")


def _unsigned_quotient(x: Any, y: Any, dtype: torch.dtype) -> Any:
    bits = bits_of(dtype)
    if bits < 64:
        wide = widen(y, torch.int64, bits).clamp(min=1)
        return torch.div(widen(x, torch.int64, bits), wide, rounding_mode="trunc").to(dtype)
    half = torch.div(shift_right(x, 1), y.clamp(min=1), rounding_mode="trunc") * 2
    result = half + ~unsigned_less(x - half * y, y, dtype)  # too small by at most one
    return torch.where(y < 0, (~unsigned_less(x, y, dtype)).to(dtype), result)


def remainder(x: Any, y: Any, dtype: torch.dtype, *, unsigned: bool) -> Any:
    """Returns the remainder of division towards zero: the dividend where the divisor is zero."""
    if unsigned:
        return x - quotient(x, y, dtype, unsigned=True) * y if bits_of(dtype) == 64 else _small(
            x, y, dtype
        )  # fmt: skip
    if is_number(y):
        if y == 0:
            return x
        return torch.zeros_like(x) if y == -1 else torch.fmod(x, y)
    odd = y == 0 if dtype is torch.uint8 else (y == 0) | (y == -1)
    result = torch.fmod(as_tensor(x, y), torch.where(odd, 1, y))
    return torch.where(y == 0, x, result)


def _small(x: Any, y: Any, dtype: torch.dtype) -> Any:
    """Returns remainders of carried unsigned integers of less than 64 bits."""
    bits = bits_of(dtype)
    if is_number(y):
        if y == 0:
            return x
        wide = widen(x, torch.int64, bits)
        return torch.fmod(wide, y & ((1 << bits) - 1)).to(dtype)
    divisor = widen(y, torch.int64, bits)
    dividend = as_tensor(widen(x, torch.int64, bits), divisor)
    result = torch.fmod(dividend, divisor.clamp(min=1)).to(dtype)
    return torch.where(y == 0, x, result)
