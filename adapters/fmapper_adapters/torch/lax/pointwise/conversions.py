"""Conversions between dtypes, bits of numbers, and parts of complex numbers."""

from __future__ import annotations

from typing import Any

import torch

from fmapper.programs import DType
from fmapper_adapters.torch.lax.pointwise.casts import convert
from fmapper_adapters.torch.lax.pointwise.numbers import as_tensor
from fmapper_adapters.torch.lax.table import Avals, lax, pointwise
from fmapper_adapters.torch.model.emit import current


@lax("convert_element_type", takes_avals=True, dims=pointwise)
def convert_element_type(x: Any, *, new_dtype: DType, weak_type: bool = False, avals: Avals) -> Any:
    target = avals.results[0][0]
    return convert(x, avals.operands[0][0], current().dtype(target), target)


@lax("to_edtype", "from_edtype")
def to_same_dtype(x: Any, *, dtype: Any = None, edtype: Any = None) -> Any:
    return x


@lax("bitcast_convert_type")
def bitcast_convert_type(x: Any, *, new_dtype: DType) -> Any:
    """Reinterprets the bits as another dtype; smaller parts go to a last dimension."""
    dtype = current().dtype(new_dtype.name)
    if dtype.itemsize < x.dtype.itemsize:
        return x.unsqueeze(-1).view(dtype)
    if dtype.itemsize > x.dtype.itemsize:
        return x.contiguous().view(dtype).squeeze(-1)
    return x.view(dtype)


# The integers of the same size, and the bits of the exponent and of the mantissa.
_FORMATS = {
    torch.float64: (torch.int64, 11, 52),
    torch.float32: (torch.int32, 8, 23),
    torch.float16: (torch.int16, 5, 10),
    torch.bfloat16: (torch.int16, 8, 7),
}


@lax("reduce_precision", dims=pointwise)
def reduce_precision(x: Any, *, exponent_bits: int, mantissa_bits: int) -> Any:
    """Rounds floats to fewer bits; too small numbers become zero, too large ones infinite."""
    _, exponent, mantissa = _FORMATS[x.dtype]
    if exponent_bits < 1 or mantissa_bits < 0:
        raise ValueError(f"{exponent_bits} and {mantissa_bits} bits are not a floating format")
    if exponent_bits >= exponent and mantissa_bits >= mantissa:
        return x
    if x.dtype is torch.float32 and (exponent_bits, mantissa_bits) == (8, 7):
        return x.to(torch.bfloat16).to(torch.float32)
    fixed = x.detach()
    rounded = _round(fixed, exponent_bits, mantissa_bits)
    # a zero of the same sign, whose derivative is one
    slope = torch.where(torch.signbit(fixed), -(fixed - x), x - fixed)
    return torch.where(torch.isfinite(rounded), rounded + slope, rounded)


def _round(x: Any, exponent_bits: int, mantissa_bits: int) -> Any:
    kind, exponent, mantissa = _FORMATS[x.dtype]
    bits = x.view(kind)
    lost = mantissa - mantissa_bits
    if lost > 0:  # ties round to even
        last = (bits >> lost) & 1
        bits = (bits + last + ((1 << (lost - 1)) - 1)) & -(1 << lost)
    rounded = bits.view(x.dtype)
    if exponent_bits < exponent:
        largest = (1 << (exponent_bits - 1)) - 1
        zero = torch.copysign(torch.zeros_like(x), x)
        size = torch.abs(rounded)
        rounded = torch.where(size < 2.0 ** (1 - largest), zero, rounded)
        infinite = torch.copysign(torch.full_like(x, torch.inf), x)
        rounded = torch.where(size >= 2.0 ** (largest + 1), infinite, rounded)
    return torch.where(torch.isfinite(x), rounded, x)


@lax("complex", takes_numbers=True)
def complex_(x: Any, y: Any) -> Any:
    return torch.complex(as_tensor(x, y), as_tensor(y, x))


@lax("real")
def real(x: Any) -> Any:
    return torch.real(x)


@lax("imag")
def imag(x: Any) -> Any:
    return torch.imag(x)


@lax("conj")
def conj(x: Any, *, input_dtype: Any = None, _input_dtype: Any = None) -> Any:
    if not x.is_complex():
        return torch.complex(x, torch.zeros_like(x))
    return torch.conj_physical(x)  # not a lazily conjugated view
