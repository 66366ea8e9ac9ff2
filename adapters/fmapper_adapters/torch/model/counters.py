"""Other generators of JAX that hash counters: philox2x32, philox4x32, threefry4x32 and XLA's.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Words are int32 with the
bits of JAX's uint32; products are computed in int64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fmapper_adapters.torch.model import threefry

Tensor = torch.Tensor

_LOW = 0xFFFFFFFF
_SIGN = -(1 << 63)
_PARITY = 0x1BD11BDA
_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))


def _wide(x: Tensor) -> Tensor:
    """Returns the unsigned value of a word, in int64."""
    return x.to(torch.int64) & _LOW


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the upper and the lower word of a product."""
    product = x * factor
    return (product >> 32) & _LOW, product & _LOW


def philox2x32(key: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ten rounds of Philox on two words."""
    key, x0, x1 = _wide(key), _wide(x0), _wide(x1)
    for turn in range(10):
        high, low = _product(0xD256D193, x0)
        x0, x1 = high ^ x1 ^ ((key + turn * 0x9E3779B9) & _LOW), low
    return x0.to(torch.int32), x1.to(torch.int32)


def philox4x32(
    k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor, x2: Tensor, x3: Tensor
) -> tuple[Tensor, ...]:
    """Returns ten rounds of Philox on four words."""
    k0, k1, x0, x1, x2, x3 = (_wide(x) for x in (k0, k1, x0, x1, x2, x3))
    for turn in range(10):
        high0, low0 = _product(0xD2511F53, x0)
        high1, low1 = _product(0xCD9E8D57, x2)
        x0 = high1 ^ x1 ^ ((k0 + turn * 0x9E3779B9) & _LOW)
        x2 = high0 ^ x3 ^ ((k1 + turn * 0xBB67AE85) & _LOW)
        x1, x3 = low1, low0
    return tuple(x.to(torch.int32) for x in (x0, x1, x2, x3))


def threefry4x32(*words: Tensor) -> tuple[Tensor, ...]:
    """Runs twenty rounds of Threefry on four words; the key's four words come first."""
    keys = list(words[:4])
    keys.append(keys[0] ^ keys[1] ^ keys[2] ^ keys[3] ^ _PARITY)
    x0, x1, x2, x3 = (x + key for x, key in zip(words[4:], keys, strict=False))
    for turn in range(20):
        first, second = _ROTATIONS[turn % 8]
        if turn % 2:
            x0 = x0 + x3
            x3 = _rotate(x3, first) ^ x0
            x2 = x2 + x1
            x1 = _rotate(x1, second) ^ x2
        else:
            x0 = x0 + x1
            x1 = _rotate(x1, first) ^ x0
            x2 = x2 + x3
            x3 = _rotate(x3, second) ^ x2
        if turn % 4 == 3:
            at = turn // 4
            x0 = x0 + keys[(at + 1) % 5]
            x1 = x1 + keys[(at + 2) % 5]
            x2 = x2 + keys[(at + 3) % 5]
            x3 = x3 + keys[(at + 4) % 5] + (at + 1)
    return x0, x1, x2, x3


def _rotate(x: Tensor, steps: int) -> Tensor:
    return ((x >> (32 - steps)) & ((1 << steps) - 1)) | (x << steps)


def state_bits(
    state: Tensor, width: int, shape: Sequence[int], algorithm: str
) -> tuple[Tensor, Tensor]:
    """Computes XLA's `RngBitGenerator` on a CPU: the next state, and bits in blocks.

    Args:
        state: Four words, int32, or two numbers of 64 bits: a key, and the counter of blocks.
        width: The number of bits of an element: 8, 16, 32 or 64.
        shape: The shape to draw.
        algorithm: `philox`, whose blocks have four words, or `threefry`, with two.
    """
    is_split = state.dtype is torch.int32
    words = state if is_split else _halves(state).flatten()
    k0, k1, low, high = words.unbind(-1)
    start = (_wide(high) << 32) | _wide(low)
    key = (_wide(k1) << 32) | _wide(k0)
    if algorithm == "philox":
        size = math.prod(shape) * (2 if width == 64 else 1)
        count = -(-size // 4)
        numbers = start + torch.arange(count, device=state.device)
        # the key is added to the upper words of the counter, with the carry
        above = key + ((numbers ^ _SIGN) < (start ^ _SIGN)).to(torch.int64)
        counter = *_halves(numbers).unbind(-1), *_halves(above).unbind(-1)
        drawn = torch.stack(philox4x32(k0, k1, *counter), -1).flatten()[:size]
        if width == 64:
            drawn = _join(*drawn.reshape(-1, 2).unbind(-1))
        drawn = drawn.reshape(tuple(shape))
    else:
        half, at = (list(shape), 0) if width == 64 else _half(shape)
        count = math.prod(half)
        numbers = start + torch.arange(count, device=state.device).reshape(half)
        pair = threefry.hash_words(k0, k1, *_halves(numbers).unbind(-1))
        if width == 64:
            drawn = _join(*pair)
        else:
            drawn = torch.stack(pair, at + 1).flatten(at, at + 1)
            drawn = drawn.narrow(at, 0, shape[at] if shape else 1).reshape(tuple(shape))
    if width < 32:
        drawn = drawn.to(torch.uint8 if width == 8 else torch.int16)
    after = start + count
    if is_split:
        return torch.cat((words[:2], _halves(after))), drawn
    return torch.stack((key, after)), drawn


def _half(shape: Sequence[int]) -> tuple[list[int], int]:
    """Returns the dimension along which XLA pairs words: the first even one, else a longest one.

    Returns:
        The shape of the blocks, and that dimension.
    """
    sizes = list(shape) or [1]
    even = (i for i, n in enumerate(sizes) if n % 2 == 0)
    at = next(even, sizes.index(max(sizes)))
    sizes[at] = -(-sizes[at] // 2)
    return sizes, at


def _join(low: Tensor, high: Tensor) -> Tensor:
    """Joins two words to one number of 64 bits."""
    return (high.to(torch.int64) << 32) | _wide(low)


def _halves(x: Tensor) -> Tensor:
    """Returns the lower and the upper word of numbers of 64 bits, in a last dimension."""
    return torch.stack((x.to(torch.int32), (x >> 32).to(torch.int32)), -1)
