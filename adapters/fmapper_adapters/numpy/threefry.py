"""The generator threefry2x32 in NumPy: bits from a key, a block of counters at a time.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). As in JAX
(`jax_threefry_partitionable`), the counter of an element is its flat index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

_BLOCK = 1 << 15  # counters: with their buffers they stay in the second-level cache
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_LOW = 0xFFFFFFFF


def words(key: Array) -> tuple[int, int]:
    """Returns the two halves of a raw key as Python numbers."""
    return int(key[0]), int(key[1])


def hash_counters(key: Array, high: Array, low: Array, spare: Array) -> None:
    """Replaces counters by their hashes, in place; the three arrays are of uint32."""
    first, second = words(key)
    schedule = (first, second, first ^ second ^ _PARITY)
    high += np.uint32(first)
    low += np.uint32(second)
    for turn in range(5):
        for steps in _ROTATIONS[turn % 2]:
            high += low
            np.left_shift(low, np.uint32(steps), out=spare)
            low >>= np.uint32(32 - steps)
            low |= spare
            low ^= high
        high += np.uint32(schedule[(turn + 1) % 3])
        low += np.uint32((schedule[(turn + 2) % 3] + turn + 1) & _LOW)


def blocks(key: Array, size: int) -> Iterator[tuple[int, int, Array, Array]]:
    """Yields start and stop of each block, and its two words, which the next block overwrites."""
    room = min(_BLOCK, size)
    ramp = np.arange(room, dtype=np.uint32)
    high, low, spare = (np.empty(room, np.uint32) for _ in range(3))
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        used = slice(stop - start)
        high[used] = start >> 32
        np.add(ramp[used], np.uint32(start & _LOW), out=low[used])
        hash_counters(key, high[used], low[used], spare[used])
        yield start, stop, high[used], low[used]


def bits(key: Array, width: int, shape: Sequence[int]) -> Array:
    """Draws random unsigned integers of 8, 16, 32 or 64 bits."""
    out = np.empty(math.prod(shape), f"uint{width}")
    for start, stop, high, low in blocks(key, out.size):
        part = out[start:stop]
        if width == 64:
            np.copyto(part, high)
            part <<= np.uint64(32)
            part |= low
        else:
            np.bitwise_xor(high, low, out=high)
            np.copyto(part, high, casting="unsafe")
    return out.reshape(shape)
