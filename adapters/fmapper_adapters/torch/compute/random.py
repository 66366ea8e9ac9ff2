"""Kernels of `fmapper.random` for torch: threefry2x32 as in JAX, in int64 with masks.

torch has uint32 but almost no arithmetic for it. For torch.compile and torch.func.vmap, nothing is
done in place and no values are read; nor are bits viewed as another dtype, for which
torch.func.vmap of torch 2.11 has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fmapper_adapters.torch.arrays import tensors

Tensor = torch.Tensor

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_LOW = 0xFFFFFFFF
_SIGN = -(1 << 63)
# Bits of the mantissa of a float, and bits that are drawn for it.
_LAYOUTS = {"float64": (52, 64), "float32": (23, 32), "float16": (10, 16), "bfloat16": (7, 8)}
# Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011), table 1.
_CENTRAL = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
            -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
_TAIL = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
         -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)  # fmt: skip


HOST = False


def raw(key: Any) -> Tensor | None:
    """Returns a key as it is; None if it is not one."""
    return key if tuple(key.shape) == (2,) and key.dtype == torch.uint32 else None


def lacks(dtype: str) -> str | None:
    """Returns None: every dtype can be drawn."""
    return None


def on_host(key: Tensor, dtype: str) -> bool:
    """Returns whether NumPy can draw, which is faster: on the CPU, outside of traces."""
    if torch.compiler.is_compiling() or dtype == "bfloat16" or not key.is_cpu:
        return False
    return type(key) is Tensor and tensors.has_memory(key)


def to_host(key: Tensor) -> np.ndarray[Any, Any]:
    """Returns the words as a NumPy array.

    Raises:
        TypeError: The key is traced, or has no values.
    """
    values, _ = tensors.plain(key)
    words: np.ndarray[Any, Any] = values.cpu().numpy()
    return words


def put(array: Any, like: Tensor | None) -> Tensor:
    """Moves a NumPy array or a tensor to the device of `like`."""
    tensor = array if isinstance(array, Tensor) else tensors.from_numpy(np.asarray(array))
    return tensor if like is None else tensor.to(like.device)


def _hash(key: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    first, second = (key.to(torch.int64) & _LOW).unbind(-1)
    schedule = (first, second, first ^ second ^ _PARITY)
    high = (high + first) & _LOW
    low = (low + second) & _LOW
    for turn in range(5):
        for steps in _ROTATIONS[turn % 2]:
            high = (high + low) & _LOW
            low = (((low << steps) & _LOW) | (low >> (32 - steps))) ^ high
        high = (high + schedule[(turn + 1) % 3]) & _LOW
        low = (low + schedule[(turn + 2) % 3] + (turn + 1)) & _LOW
    return high, low


def _words(key: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    counters = torch.arange(math.prod(shape), device=key.device).reshape(tuple(shape))
    return _hash(key, counters >> 32, counters & _LOW)


def _bits(key: Tensor, width: int, shape: Sequence[int]) -> Tensor:
    """Draws random bits in int64."""
    high, low = _words(key, shape)
    return (high << 32) | low if width == 64 else (high ^ low) & ((1 << width) - 1)


def split(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns new keys, one per counter."""
    return torch.stack(_words(key, shape), -1).to(torch.uint32)


def fold_in(key: Tensor, data: Any) -> Tensor:
    """Returns a new key, hashed from the key and a number."""
    word = torch.as_tensor(data, device=key.device)
    if word.ndim:
        raise TypeError(f"fold_in takes one integer, not a tensor of shape {tuple(word.shape)}")
    word = word.to(torch.int64) & _LOW
    return torch.stack(_hash(key, torch.zeros_like(word), word), -1).to(torch.uint32)


def bits(key: Tensor, width: int, shape: Sequence[int]) -> Tensor:
    """Draws random unsigned integers of 8, 16, 32 or 64 bits."""
    words = _bits(key, width, shape)
    dtype: torch.dtype = getattr(torch, f"uint{width}")
    return words.to(dtype)


def uniform(key: Tensor, shape: Sequence[int], dtype: str, low: Any, high: Any) -> Tensor:
    """Returns floats in [low, high): random mantissas, less one, scaled."""
    kind: torch.dtype = getattr(torch, dtype)
    mantissa, drawn = _LAYOUTS[dtype]
    pattern = _bits(key, drawn, shape) >> (drawn - mantissa)
    if drawn == 64:  # the shift has extended the sign
        pattern = pattern & ((1 << mantissa) - 1)
    unit = pattern.to(kind) * 2.0**-mantissa
    if isinstance(low, int | float) and isinstance(high, int | float) and (low, high) == (0, 1):
        return unit
    floor, ceiling = (torch.as_tensor(x, dtype=kind, device=key.device) for x in (low, high))
    span = ceiling - floor
    # As compiled by XLA: product and sum are rounded once, if the processor can.
    if kind is torch.float64:
        scaled = _fma(unit, span, floor)
    elif kind is torch.float32:
        scaled = _add_odd(unit.double() * span.double(), floor.double()).float()
    else:
        scaled = unit * span + floor
    return torch.maximum(floor, scaled)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a sum and its rounding error (Knuth)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _add_odd(a: Tensor, b: Tensor) -> Tensor:
    """Returns a sum rounded to odd, so that it can be rounded once more (Boldo, Melquiond 2008)."""
    total, lost = _two_sum(a, b)
    even = ((torch.frexp(total)[0] * 2.0**53).to(torch.int64) & 1) == 0
    toward = torch.nextafter(total, torch.copysign(torch.full_like(lost, math.inf), lost))
    return torch.where((lost != 0) & even, toward, total)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Computes `a * b + c` in float64 with one rounding; no overflow is near."""
    split = 134217729.0  # 2 ** 27 + 1, Dekker
    a_high = split * a - (split * a - a)
    b_high = split * b - (split * b - b)
    a_low, b_low = a - a_high, b - b_high
    product = a * b
    tail = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    high, low = _two_sum(c, tail)
    upper, lower = _two_sum(product, high)
    return upper + _add_odd(low, lower)


def normal(key: Tensor, shape: Sequence[int], dtype: str) -> Tensor:
    """Maps uniform numbers through the inverse normal distribution."""
    kind: torch.dtype = getattr(torch, dtype)
    least = -1 + torch.finfo(kind).eps / 2
    return _to_normal(uniform(key, shape, dtype, least, 1))


def truncated_normal(
    key: Tensor, lower: float, upper: float, shape: Sequence[int], dtype: str
) -> Tensor:
    """Draws normal numbers between the values of the distribution at two bounds."""
    kind: torch.dtype = getattr(torch, dtype)
    ends = (math.erf(bound / math.sqrt(2)) for bound in (lower, upper))
    out = _to_normal(uniform(key, shape, dtype, *ends))
    bounds = torch.tensor([lower, upper], dtype=kind, device=key.device)
    # torch.nextafter knows bfloat16, but not float16
    inward = bounds.new_tensor([math.inf, -math.inf])
    if kind is torch.float16:
        step = torch.where((bounds > 0) == (inward > 0), 1, -1).to(torch.int16)
        inside = (bounds.view(torch.int16) + step).view(kind)
    else:
        inside = torch.nextafter(bounds, inward)
    return torch.clamp(out, inside[0], inside[1])


def _to_normal(x: Tensor) -> Tensor:
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return _erfinv(wide).to(x.dtype) * torch.tensor(math.sqrt(2), dtype=x.dtype, device=x.device)


def erf_inv(x: Tensor) -> Tensor:
    """Computes XLA's inverse error function, with torch's derivative.

    torch's own differs by 60 units in the last place in the tails of float32.
    """
    plain = torch.erfinv(x)
    if x.dtype is torch.float64:
        return plain
    with torch.no_grad():
        wide = x.float()
        lost = torch.where(torch.abs(wide) < 1, _erfinv(wide).to(x.dtype) - plain, -0.0)
        lost = torch.where(x == 0, x, lost)
    return plain + lost  # exact, since the two are adjacent


def _erfinv(x: Tensor) -> Tensor:
    if x.dtype is torch.float64:
        return torch.erfinv(x)
    w = -torch.log1p(-x * x)
    return (
        torch.where(w < 5, _polynomial(w - 2.5, _CENTRAL), _polynomial(torch.sqrt(w) - 3, _TAIL))
        * x
    )


def _polynomial(t: Tensor, coefficients: Sequence[float]) -> Tensor:
    p = torch.full_like(t, coefficients[0])
    for c in coefficients[1:]:
        p = p * t + c
    return p


def bernoulli(key: Tensor, p: Any, shape: Sequence[int] | None) -> Tensor:
    """Returns whether uniform numbers are below p."""
    p = torch.as_tensor(p, device=key.device).to(torch.float32)
    below: Tensor = uniform(key, p.shape if shape is None else shape, "float32", 0, 1) < p
    return below


def randint(key: Tensor, shape: Sequence[int], low: Any, high: Any, dtype: str) -> Tensor:
    """Draws twice the bits of the dtype, modulo the span; narrow dtypes are drawn in 32 bits."""
    kind: torch.dtype = getattr(torch, dtype)
    limits = torch.iinfo(kind)
    width = max(limits.bits, 32)
    low, high = (torch.as_tensor(x, device=key.device).to(torch.int64) for x in (low, high))
    highest = limits.max + 1 if limits.bits < 32 else limits.max
    beyond = high > limits.max if limits.bits == 32 else torch.zeros_like(high, dtype=torch.bool)
    low = low.clamp(limits.min, limits.max) if dtype != "uint64" else low.clamp(min=0)
    high = high.clamp(limits.min, highest) if dtype != "uint64" else high.clamp(min=0)
    empty = high <= low
    span = torch.where(empty, 1, high - low)
    span = torch.where(beyond & ~empty, span + 1, span)
    more, fewer = (_bits(k, width, shape) for k in split(key, (2,)).unbind(0))
    if width == 64:
        root = _remainder(torch.full_like(span, 1 << 32), span)
        factor = _remainder(root * root, span)
        offset = _remainder(_remainder(more, span) * factor + _remainder(fewer, span), span)
    else:  # products wrap at 32 bits, as does a full span
        span = span & _LOW
        full = span == 0
        safe = torch.where(full, 1, span)
        root = torch.where(full, 1 << 16, (1 << 16) % safe)
        factor = ((root * root) & _LOW) % safe
        offset = ((((more % safe) * factor) & _LOW) + fewer % safe) & _LOW
        offset = torch.where(full, fewer, offset % safe)
    drawn = low + offset
    if dtype == "int32":
        drawn = ((drawn + (1 << 31)) & _LOW) - (1 << 31)
    result: Tensor = drawn.to(kind)
    return result


def _remainder(x: Tensor, n: Tensor) -> Tensor:
    """Returns the remainder of unsigned numbers in int64."""
    positive = torch.where(n > 0, n, 1)
    quotient = torch.div((x >> 1) & ~_SIGN, positive, rounding_mode="floor") << 1
    rest = x - quotient * positive
    rest = torch.where((rest ^ _SIGN) >= (positive ^ _SIGN), rest - positive, rest)
    large = torch.where((x ^ _SIGN) >= (n ^ _SIGN), x - n, x)
    return torch.where(n > 0, rest, large)


def permutation(key: Tensor, x: Any, axis: int, independent: bool) -> Tensor:
    """Sorts by random keys, as often as makes collisions unlikely."""
    if isinstance(x, int):
        return _shuffle(key, torch.arange(x, dtype=torch.int32, device=key.device), 0)
    if independent or x.ndim == 1:
        return _shuffle(key, x, axis)
    order = _shuffle(key, torch.arange(x.shape[axis], device=key.device), 0)
    return torch.index_select(x, axis, order)


def _shuffle(key: Tensor, x: Tensor, axis: int) -> Tensor:
    for _ in range(math.ceil(3 * math.log(max(1, x.numel())) / math.log(0xFFFFFFFF))):
        key, part = split(key, (2,)).unbind(0)
        order = torch.sort(_bits(part, 32, x.shape), dim=axis, stable=True).indices
        x = torch.gather(x, axis, order)
    return x


def scale(x: Tensor, factor: float) -> Tensor:
    """Returns the product in the dtype of the array."""
    return x * torch.tensor(factor, dtype=x.dtype, device=x.device)
