"""Kernels of `fmapper.random` for NumPy: the numbers of `jax.random`, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from fmapper_adapters.numpy import threefry
from fmapper_adapters.numpy.adapter import np_dtype
from fmapper_adapters.numpy.special import erfinv_

Array: TypeAlias = np.ndarray[Any, Any]

HOST = True

_PART = 1 << 15  # elements: temporaries stay in the cache
# Bits of a float, bits of its mantissa, bits that are drawn for it.
_LAYOUTS = {
    "float64": (64, 52, 64),
    "float32": (32, 23, 32),
    "float16": (16, 10, 16),
    "bfloat16": (16, 7, 8),
}


def key(seed: int) -> Array:
    """Returns the two words of a 64-bit seed."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def raw(key: Any) -> Array | None:
    """Returns a key as it is; None if it is not one."""
    good = isinstance(key, np.ndarray) and key.shape == (2,) and key.dtype == np.uint32
    return key if good else None


def lacks(dtype: str) -> str | None:
    """Returns None: every dtype can be drawn."""
    return None


def on_host(key: Array, dtype: str) -> bool:
    """Returns True: numbers are drawn here already."""
    return False


def to_host(key: Array) -> Array:
    """Returns its argument."""
    return key


def put(array: Array, like: Any) -> Array:
    """Returns its argument."""
    return array


def split(key: Array, shape: Sequence[int]) -> Array:
    """Returns new keys, one per counter."""
    out = np.empty((math.prod(shape), 2), np.uint32)
    for start, stop, high, low in threefry.blocks(key, len(out)):
        out[start:stop, 0] = high
        out[start:stop, 1] = low
    return out.reshape(*shape, 2)


def fold_in(key: Array, data: Any) -> Array:
    """Returns a new key, hashed from the key and a number."""
    if np.ndim(data):
        raise TypeError(f"fold_in takes one integer, not an array of shape {np.shape(data)}")
    out = np.array([0, int(data) & 0xFFFFFFFF], np.uint32)
    threefry.hash_counters(key, out[:1], out[1:], np.empty(1, np.uint32))
    return out


bits = threefry.bits


def uniform(key: Array, shape: Sequence[int], dtype: str, low: Any, high: Any) -> Array:
    """Returns floats in [low, high): random mantissas, less one, scaled."""
    kind = np_dtype(dtype)
    size, mantissa, drawn = _LAYOUTS[dtype]
    number = np.dtype(f"uint{size}").type
    drop = number(drawn - mantissa)
    one = np.array(1, kind).view(number)[()]
    minus_one = np.array(-1, kind)[()]
    floor, ceiling = np.asarray(low, kind), np.asarray(high, kind)
    plain = not (floor.ndim or ceiling.ndim)
    unit = plain and floor == 0 and ceiling == 1
    out = np.empty(math.prod(shape), kind)
    for start, stop, first, second in threefry.blocks(key, out.size):
        part, word = out[start:stop], first
        pattern = part.view(number)
        if size == 64:
            np.copyto(pattern, first)
            pattern <<= number(32)
            pattern |= second
        else:
            word ^= second
            if drawn < 32:
                word &= np.uint32((1 << drawn) - 1)
            np.copyto(pattern, word, casting="unsafe")
        pattern >>= drop
        pattern |= one
        part += minus_one
        if plain and not unit:
            np.copyto(part, _between(part, floor, ceiling))
    shaped = out.reshape(shape)
    return shaped if plain else _between(shaped, floor, ceiling)


def _between(unit: Array, low: Array, high: Array) -> Array:
    """Computes `unit * (high - low) + low` with one rounding, as XLA does where it can."""
    span = high - low
    if unit.dtype.itemsize < 4:
        scaled = unit * span + low
    elif unit.dtype.itemsize == 4:
        exact = unit.astype(np.float64) * np.float64(span)
        scaled = _add_odd(exact, low.astype(np.float64)).astype(np.float32)
    else:
        scaled = _fma(unit, span, low)
    return np.asarray(np.maximum(low, scaled))


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns a sum and its rounding error (Knuth)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _add_odd(a: Array, b: Array) -> Array:
    """Returns a sum rounded to odd, so that it can be rounded once more (Boldo, Melquiond 2008)."""
    total, lost = _two_sum(a, b)
    even = (total.view(np.int64) & 1) == 0
    toward = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where((lost != 0) & even, toward, total)


def _fma(a: Array, b: Array, c: Array) -> Array:
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


def normal(key: Array, shape: Sequence[int], dtype: str) -> Array:
    """Maps uniform numbers through the inverse normal distribution."""
    kind = np_dtype(dtype)
    least = np.nextafter(np.array(-1, kind), np.array(0, kind))
    out = uniform(key, shape, dtype, least, 1)
    _to_normal(out)
    return out


def truncated_normal(
    key: Array, lower: float, upper: float, shape: Sequence[int], dtype: str
) -> Array:
    """Draws normal numbers between the values of the distribution at two bounds."""
    kind = np_dtype(dtype)
    ends = [np.array(math.erf(bound / math.sqrt(2)), kind) for bound in (lower, upper)]
    out = uniform(key, shape, dtype, *ends)
    _to_normal(out)
    inside = np.nextafter(np.array(lower, kind), np.array(np.inf, kind))
    below = np.nextafter(np.array(upper, kind), np.array(-np.inf, kind))
    return np.asarray(np.clip(out, inside, below))


def _to_normal(out: Array) -> None:
    flat = out.reshape(-1)
    narrow = out.dtype.itemsize < 4
    for start in range(0, flat.size, _PART):
        part = flat[start : start + _PART]
        wide = part.astype(np.float32) if narrow else part
        erfinv_(wide)
        if narrow:  # rounded in between, as in JAX
            np.copyto(part, wide.astype(part.dtype))
        part *= np.array(math.sqrt(2), part.dtype)


def bernoulli(key: Array, p: Any, shape: Sequence[int] | None) -> Array:
    """Returns whether uniform numbers are below p."""
    p = np.asarray(p, np.float32)
    return np.asarray(uniform(key, p.shape if shape is None else shape, "float32", 0, 1) < p)


def randint(key: Array, shape: Sequence[int], low: Any, high: Any, dtype: str) -> Array:
    """Draws twice the bits of the dtype, modulo the span; narrow dtypes are drawn in 32 bits."""
    kind = np.dtype(dtype)
    if kind.itemsize < 4:
        limits = np.iinfo(kind)
        low = np.clip(_integers(low), limits.min, limits.max)
        high = np.clip(_integers(high), limits.min, limits.max + 1)
        return randint(key, shape, low, high, "int32").astype(kind)
    unsigned = np.dtype(f"uint{8 * kind.itemsize}")
    limits = np.iinfo(kind)
    floor, ceiling = (np.clip(_integers(x), limits.min, limits.max) for x in (low, high))
    beyond = _integers(high) > limits.max
    empty = ceiling <= floor
    floor, ceiling = floor.astype(kind), ceiling.astype(kind)
    one = np.ones((), unsigned)
    span = np.where(empty, one, np.subtract(ceiling, floor).astype(unsigned))
    span = np.where(beyond & ~empty, np.add(span, one), span)
    keys = split(key, (2,))
    more, fewer = (bits(k, 8 * kind.itemsize, shape) for k in keys)
    with np.errstate(divide="ignore"):  # the span of a dtype's full range wraps to zero
        root = np.remainder(np.array(1 << 4 * kind.itemsize, unsigned), span)
        factor = np.remainder(np.multiply(root, root), span)
        offset = np.multiply(np.remainder(more, span), factor)
        offset = np.remainder(np.add(offset, np.remainder(fewer, span)), span)
    # XLA's remainder by zero returns the number, so that only the second draw counts.
    offset = np.where(span == 0, fewer, offset)
    return np.asarray(np.add(floor, offset.astype(kind)))


def _integers(x: Any) -> Array:
    values = np.asarray(x)
    return values if values.dtype.kind in "iu" else values.astype(np.int64)


def permutation(key: Array, x: Any, axis: int, independent: bool) -> Array:
    """Sorts by random keys, as often as makes collisions unlikely."""
    if isinstance(x, int):
        return _shuffle(key, np.arange(x, dtype=np.int32), 0)
    if independent or x.ndim == 1:
        return _shuffle(key, x, axis)
    order = _shuffle(key, np.arange(x.shape[axis]), 0)
    return np.asarray(np.take(x, order, axis))


def _shuffle(key: Array, x: Array, axis: int) -> Array:
    for _ in range(math.ceil(3 * math.log(max(1, x.size)) / math.log(0xFFFFFFFF))):
        key, part = split(key, (2,))
        order = np.argsort(bits(part, 32, x.shape), axis, kind="stable")
        x = np.take_along_axis(x, order, axis)
    return x


def scale(x: Array, factor: float) -> Array:
    """Returns the product in the dtype of the array."""
    return np.asarray(x * np.asarray(factor, x.dtype))
