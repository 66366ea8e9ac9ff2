"""Arithmetic of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from fmapper_adapters.torch.lax.pointwise.casts import convert
from fmapper_adapters.torch.lax.pointwise.numbers import (
    as_tensor,
    flip_sign_bit,
    is_number,
    precedes,
    quotient,
    remainder,
    tensor_first,
    widen,
)
from fmapper_adapters.torch.lax.table import Avals, lax, pointwise
from fmapper_adapters.torch.lax.types import bits_of
from fmapper_adapters.torch.model.emit import current


@lax("add", "add_any", takes_numbers=True, dims=pointwise)
def add(x: Any, y: Any) -> Any:
    x, y = tensor_first(x, y)
    return x + y


@lax("sub", takes_numbers=True, dims=pointwise)
def sub(x: Any, y: Any) -> Any:
    return x - y


@lax("mul", takes_numbers=True, dims=pointwise)
def mul(x: Any, y: Any) -> Any:
    x, y = tensor_first(x, y)
    return x * y


@lax("mulhi", takes_numbers=True, takes_avals=True)
def mulhi(x: Any, y: Any, *, avals: Avals) -> Any:
    x, y = tensor_first(x, y)
    dtype, bits = x.dtype, bits_of(x.dtype)
    unsigned = avals.results[0][0].startswith("u")
    if bits < 64:
        wide = widen if unsigned else lambda z, to, _: z if is_number(z) else z.to(to)
        return ((wide(x, torch.int64, bits) * wide(y, torch.int64, bits)) >> bits).to(dtype)
    low = (1 << 32) - 1
    a, b, c, d = x >> 32, x & low, y >> 32, y & low
    if unsigned:
        a, c = a & low, c & low
    middle = a * d + (((b * d) >> 32) & low)
    if not unsigned:
        other = b * c + (middle & low)
        return a * c + (middle >> 32) + (other >> 32)
    other = b * c + (middle & low)
    return a * c + ((middle >> 32) & low) + ((other >> 32) & low)


@lax("neg", dims=pointwise)
def neg(x: Any) -> Any:
    return -x


@lax("abs", dims=pointwise)
def absolute(x: Any) -> Any:
    if not x.is_floating_point():
        return torch.abs(x)
    x = x + 0.0  # -0.0 becomes 0.0, where JAX's gradient is one
    return torch.where(torch.signbit(x), -x, x)


@lax("sign", takes_avals=True, dims=pointwise)
def sign(x: Any, *, avals: Avals) -> Any:
    if x.is_complex():
        return torch.sgn(x)
    x = x.detach()  # like floor
    if x.is_floating_point():  # keeps NaN and -0.0
        return torch.where(torch.abs(x) > 0, torch.sign(x), x)
    return (x != 0).to(x.dtype) if avals.is_unsigned else torch.sign(x)


@lax("div", takes_numbers=True, takes_avals=True, dims=pointwise)
def div(x: Any, y: Any, *, avals: Avals) -> Any:
    if "int" not in avals.results[0][0]:
        return x / y
    dtype = y.dtype if is_number(x) else x.dtype
    return quotient(x, y, dtype, unsigned=avals.is_unsigned)


@lax("rem", takes_numbers=True, takes_avals=True, dims=pointwise)
def rem(x: Any, y: Any, *, avals: Avals) -> Any:
    if "int" not in avals.results[0][0]:
        return _float_remainder(as_tensor(x, y), as_tensor(y, x))
    dtype = y.dtype if is_number(x) else x.dtype
    return remainder(x, y, dtype, unsigned=avals.is_unsigned)


def _float_remainder(x: Any, y: Any) -> Any:
    """Returns the remainder; torch's in float32 is NaN for large quotients."""
    if x.dtype is torch.float64:
        return torch.fmod(x, y)
    return torch.fmod(x.to(torch.float64), y.to(torch.float64)).to(x.dtype)


def _extreme(name: str) -> Any:
    function, greater = getattr(torch, name), name == "maximum"

    def extreme(x: Any, y: Any, *, avals: Avals) -> Any:
        x, y = tensor_first(x, y)
        if x.is_complex():
            y = as_tensor(y, x)
            first = precedes(y, x) if greater else precedes(x, y)
            return torch.where(first, x, y)
        if x.dtype is torch.bool:
            return torch.logical_or(x, as_tensor(y, x)) if greater else torch.logical_and(
                x, as_tensor(y, x)
            )  # fmt: skip
        if avals.is_unsigned:
            dtype = x.dtype
            x, y = flip_sign_bit(x, dtype), flip_sign_bit(y, dtype)
            return flip_sign_bit(function(x, as_tensor(y, x)), dtype)
        result = function(x, as_tensor(y, x))
        if not x.is_floating_point() or (is_number(y) and y != 0):
            return result
        return _signed_zero(result, x, y, greater=greater)

    return extreme


def _signed_zero(value: Any, x: Any, y: Any, *, greater: bool) -> Any:
    """Returns the extreme of floats with -0.0 < 0.0, where torch returns either zero."""
    if not greater:
        return -_signed_zero(-value, -x, -y, greater=True)
    if not is_number(y):
        both = (x == 0) & (y == 0)
        return value + torch.where(both, x + y, -0.0).detach()
    if math.copysign(1, y) > 0:
        return value + 0.0  # never -0.0
    return value + torch.where(x == 0, x, -0.0).detach()


lax("max", takes_numbers=True, takes_avals=True, dims=pointwise)(_extreme("maximum"))
lax("min", takes_numbers=True, takes_avals=True, dims=pointwise)(_extreme("minimum"))


@lax("clamp", takes_numbers=True, takes_avals=True, dims=pointwise)
def clamp(low: Any, x: Any, high: Any, *, avals: Avals) -> Any:
    if x.is_floating_point():
        return _clamp(low, x, high)
    if x.is_complex():  # compares real parts only
        low, high = as_tensor(low, x), as_tensor(high, x)
        bounded = torch.where(torch.real(x) <= torch.real(low), low, x)
        return torch.where(torch.real(bounded) <= torch.real(high), bounded, high)
    if x.dtype is torch.bool:
        return _extreme("minimum")(_extreme("maximum")(x, low, avals=avals), high, avals=avals)
    if avals.is_unsigned:
        dtype = x.dtype
        low, high = flip_sign_bit(low, dtype), flip_sign_bit(high, dtype)
        return flip_sign_bit(_bound(low, flip_sign_bit(x, dtype), high), dtype)
    return _bound(low, x, high)


def _bound(low: Any, x: Any, high: Any) -> Any:
    if is_number(low) and is_number(high):
        return torch.clamp(x, low, high)
    return torch.minimum(torch.maximum(x, as_tensor(low, x)), as_tensor(high, x))


def _clamp(low: Any, x: Any, high: Any) -> Any:
    """Clamps floats; at the bounds the gradient is zero, as in JAX."""
    inside = (x > low) & (x < high)
    if is_number(low) and is_number(high):
        clamped = torch.clamp(x, low, high).detach()
        return torch.where(inside, x, clamped + 0.0 if low == 0 else clamped)  # no -0.0
    bounded = _bound(low, x, high).detach()
    clamped = torch.where(inside, x, bounded)
    clamped = torch.where((x < low) & (bounded == low), low, clamped)
    return torch.where((x > high) & (bounded == high), high, clamped)


@lax("square", dims=pointwise)
def square(x: Any) -> Any:
    return torch.square(x)


@lax("integer_pow", dims=pointwise)
def integer_pow(x: Any, *, y: int) -> Any:
    if y == 0:
        return torch.ones_like(x)
    if (y == 3 or y < -1) and x.dtype is not torch.float16 and not x.is_complex():
        return torch.pow(x, y)  # its gradient, `y * x**(y - 1)`, is right even if `x**y` overflows
    product: Any = None
    power, left = x, abs(y)
    while left:
        if left & 1:
            product = power if product is None else product * power
        left >>= 1
        if left:
            power = torch.square(power)
    return torch.reciprocal(product) if y < 0 else product


@lax("polynomial")
def polynomial(x: Any, *coefficients: Any) -> Any:
    """Computes `c0 + x * (c1 + x * (c2 + ...))`, by Horner's scheme, as JAX does since 0.12."""
    total: Any = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total


@lax("pow", takes_numbers=True, takes_avals=True, dims=pointwise)
def power(x: Any, y: Any, *, avals: Avals) -> Any:
    (kind, _), (exponent, _) = avals.operands
    if kind != exponent:  # floats to the power of integers
        dtype = current().dtype(kind)
        y = float(y) if is_number(y) else convert(y, exponent, dtype)
    if current().dtype(kind).is_complex:
        y = as_tensor(y, x)
        return torch.where(y == 0, 1.0, torch.pow(x, y))
    if is_number(y) and abs(y) == 0.5:
        y = as_tensor(y, x)  # torch computes a root, which differs for -0.0 and -inf
    return torch.pow(x, y)


@lax("nextafter", takes_numbers=True, dims=pointwise)
def nextafter(x: Any, y: Any) -> Any:
    x, y = as_tensor(x, y), as_tensor(y, x)
    if x.dtype is not torch.float16:
        return torch.nextafter(x, y)
    bits = x.view(torch.int16)
    towards_zero = (x < y) == (x < 0)
    step = torch.where(towards_zero, bits - 1, bits + 1)
    least = torch.copysign(torch.full_like(x, 2.0**-24), y)
    result = torch.where(x == 0, least, step.view(torch.float16))
    return torch.where(x == y, y, torch.where(torch.isnan(x) | torch.isnan(y), torch.nan, result))


@lax("is_finite", dims=pointwise)
def is_finite(x: Any) -> Any:
    return torch.isfinite(x)


# JAX stops gradients at a step: a zero gradient times an infinite one would be NaN.


@lax("floor", dims=pointwise)
def floor(x: Any) -> Any:
    return torch.floor(x.detach())


@lax("ceil", dims=pointwise)
def ceil(x: Any) -> Any:
    return torch.ceil(x.detach())


@lax("round", dims=pointwise)
def round_(x: Any, *, rounding_method: Any) -> Any:
    x = x.detach()
    if rounding_method in (1, "to_nearest_even"):
        return torch.round(x)
    whole = torch.trunc(x)
    return whole + torch.copysign((torch.abs(x - whole) >= 0.5).to(x.dtype), x)
