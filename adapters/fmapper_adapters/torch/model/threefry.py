"""Random bits of JAX in torch: threefry2x32 and its relatives, in int32, whose sums wrap.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The counter of an element is
JAX's choice: see `jax_threefry_partitionable`. Keys are arrays of words, in the last dimension;
unsigned integers are carried as signed ones of the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import fmapper.random
from fmapper_adapters.torch.compute import random

Tensor = torch.Tensor

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# Bits that are drawn for a float, and bits of its mantissa.
_LAYOUTS = {
    torch.float64: (64, 52),
    torch.float32: (32, 23),
    torch.float16: (16, 10),
    torch.bfloat16: (8, 7),
}
_CARRIERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def hash_words(key1: Tensor, key2: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the threefry2x32 hash of pairs of words, all int32; shapes are broadcast."""
    keys = key1, key2, key1 ^ key2 ^ _PARITY
    low = low + key2
    high = high + key1 + low
    low = _rotate(low, 13) ^ high  # has the full shape from here on, so in-place operations work
    for turn in range(5):
        for steps in _ROTATIONS[turn % 2]:
            if turn or steps != 13:
                high += low
                low = _rotate(low, steps)
                low ^= high
        high += keys[(turn + 1) % 3]
        low += keys[(turn + 2) % 3] + (turn + 1)
    return high, low


def _rotate(x: Tensor, steps: int) -> Tensor:
    """Rotates bits to the left."""
    right = x >> (32 - steps)
    right &= (1 << steps) - 1
    right |= x << steps
    return right


def _halves(key: Tensor, ndim: int) -> tuple[Tensor, Tensor]:
    """Returns the two words of each key, with dimensions for draws behind those of the keys."""
    first, second = key.unbind(-1)
    ones = (1,) * ndim
    return first.reshape(first.shape + ones), second.reshape(second.shape + ones)


def counters(shape: Sequence[int], device: Any = None) -> tuple[Any, Tensor]:
    """Returns the upper and the lower words of the flat index of each element."""
    count = math.prod(shape)
    if not isinstance(count, int) or count <= 1 << 31:
        numbers = torch.arange(count, dtype=torch.int32, device=device).reshape(tuple(shape))
        return torch.zeros_like(numbers), numbers
    wide = torch.arange(count, device=device).reshape(tuple(shape))
    return (wide >> 32).to(torch.int32), wide.to(torch.int32)


def _draw(key: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns two words for each element, after the dimensions of the keys."""
    return hash_words(*_halves(key, len(shape)), *counters(shape, key.device))


def _draw_in_halves(key: Tensor, count: int) -> Tensor:
    """Returns words as JAX draws them without `jax_threefry_partitionable`.

    The first half of the counters are the upper words, the second half the lower ones.
    """
    numbers = torch.arange(count + count % 2, dtype=torch.int32, device=key.device)
    if count % 2:
        numbers = torch.where(numbers < count, numbers, 0)
    high, low = numbers.reshape(2, -1).unbind(0)
    return torch.cat(hash_words(*_halves(key, 1), high, low), -1)[..., :count]


def bits(key: Tensor, width: int, shape: Sequence[int], *, partitionable: bool = True) -> Tensor:
    """Draws random bits of 8, 16, 32 or 64 each.

    Args:
        key: int32 of shape (*batch, 2).
        width: The number of bits of an element.
        shape: The shape to draw for each key.
        partitionable: The value of `jax_threefry_partitionable`.

    Returns:
        Of shape (*batch, *shape): uint8, or the signed integers that stand for the unsigned.
    """
    if partitionable and _is_on_host(key):
        drawn: Tensor = fmapper.random.bits(key.view(torch.uint32), shape, f"uint{width}")
        return drawn.view(_CARRIERS[width])
    return hashed_bits(key, width, shape, partitionable=partitionable)


def hashed_bits(
    key: Tensor, width: int, shape: Sequence[int], *, partitionable: bool = True
) -> Tensor:
    """Draws the bits of `bits` by torch's own operations."""
    if partitionable:
        high, low = _draw(key, shape)
        if width == 64:
            return (high.to(torch.int64) << 32) | (low.to(torch.int64) & 0xFFFFFFFF)
        return _narrow(high ^ low, width)
    size = math.prod(shape)
    words = _draw_in_halves(key, -(-width * size // 32))
    if width == 64:
        high, low = words.reshape(*key.shape[:-1], 2, size).unbind(-2)
        drawn = (high.to(torch.int64) << 32) | (low.to(torch.int64) & 0xFFFFFFFF)
    elif width == 32:
        drawn = words
    else:
        shifts = torch.arange(0, 32, width, dtype=torch.int32, device=key.device)
        drawn = _narrow(words.unsqueeze(-1) >> shifts, width).flatten(-2)[..., :size]
    return drawn.reshape(*key.shape[:-1], *shape)


def _is_on_host(key: Tensor) -> bool:
    """Returns whether NumPy draws, which is several times as fast as torch."""
    return key.ndim == 1 and random.on_host(key, "uint32")


def _narrow(words: Tensor, width: int) -> Tensor:
    """Returns the lower bits of words."""
    return words if width == 32 else words.to(_CARRIERS[width])


def uniform(
    key: Tensor, shape: Sequence[int], dtype: torch.dtype, *, partitionable: bool = True
) -> Tensor:
    """Returns floats in [0, 1) of shape (*batch, *shape): random mantissas, less one."""
    drawn, mantissa = _LAYOUTS[dtype]
    pattern = bits(key, drawn, shape, partitionable=partitionable)
    pattern = (pattern >> (drawn - mantissa)) & ((1 << mantissa) - 1)
    return pattern.to(dtype) * 2.0**-mantissa


def between(unit: Tensor, span: Tensor, low: Tensor) -> Tensor:
    """Scales floats in [0, 1) to [low, low + span), in float32 or float64.

    XLA compiles product and sum to one operation with one rounding, if the processor has it;
    autograd sees the plain sum, which differs in the last bit.
    """
    plain = near(unit, span, low)
    with torch.no_grad():
        if plain.dtype is torch.float64:
            exact = random._fma(unit, span, low)
        else:
            exact = random._add_odd(unit.double() * span.double(), low.double()).float()
        lost = exact - plain
    return torch.maximum(low, plain + lost)


def near(unit: Tensor, span: Tensor, low: Tensor) -> Tensor:
    """Computes `between` without exact rounding."""
    return unit * span + low


def split(key: Tensor, shape: Sequence[int], *, partitionable: bool = True) -> Tensor:
    """Returns new keys of shape (*batch, *shape, 2)."""
    if partitionable and _is_on_host(key):
        keys: Tensor = fmapper.random.split(key.view(torch.uint32), shape)
        return keys.view(torch.int32)
    return hashed_keys(key, shape, partitionable=partitionable)


def hashed_keys(key: Tensor, shape: Sequence[int], *, partitionable: bool = True) -> Tensor:
    """Returns the keys of `split`, by torch's own operations."""
    if partitionable:
        return torch.stack(_draw(key, shape), -1)
    words = _draw_in_halves(key, 2 * math.prod(shape))
    return words.reshape(*key.shape[:-1], *shape, 2)


def seed(seeds: Tensor) -> Tensor:
    """Makes keys from integers of up to 64 bits: the upper word (0 for fewer), the lower.

    Narrow integers keep their sign, as in JAX.
    """
    if seeds.dtype is torch.int64:
        return torch.stack(((seeds >> 32).to(torch.int32), seeds.to(torch.int32)), -1)
    low = seeds.to(torch.int32)
    return torch.stack((torch.zeros_like(low), low), -1)


def fold_in(key: Tensor, data: Tensor) -> Tensor:
    """Returns new keys, hashed from keys and numbers, which are broadcast."""
    low = data.to(torch.int32)
    first, second = key.unbind(-1)
    return torch.stack(hash_words(first, second, torch.zeros_like(low), low), -1)
