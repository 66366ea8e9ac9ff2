"""Cumulative sums, products, maxima and the like."""

from __future__ import annotations

import math
from typing import Any

import torch

from fmapper import ConversionError
from fmapper_adapters.torch.lax.pointwise.numbers import flip_sign_bit, precedes
from fmapper_adapters.torch.lax.table import Avals, along, lax


def _cumulative(name: str, function: Any) -> None:
    def cumulative(x: Any, *, axis: int, reverse: bool, avals: Avals) -> Any:
        if reverse:
            x = torch.flip(x, (axis,))
        y = function(x, axis, avals)
        return torch.flip(y, (axis,)) if reverse else y

    lax(name, takes_avals=True, dims=along("axis"))(cumulative)


def _add(function: Any) -> Any:
    def add(x: Any, axis: int, avals: Avals) -> Any:
        if x.is_floating_point() or x.is_complex():
            return function(x, axis)
        return function(x, axis, dtype=x.dtype)  # wraps around; torch would widen

    return add


def _scan(combine: Any, x: Any, axis: int) -> Any:
    """Computes cumulative results in the order of `jax.lax.associative_scan`.

    JAX differentiates cumulative functions through it: ties share a derivative according to the
        combinations, whereas torch gives all of it to the last element.
    """
    size = x.shape[axis]
    if size < 2:
        return x

    def every_other(x: Any, first: int) -> Any:
        return x[(slice(None),) * axis + (slice(first, None, 2),)]

    odd = every_other(x, 1)
    later = every_other(x, 2)
    odd = _scan(combine, combine(every_other(x, 0).narrow(axis, 0, size // 2), odd), axis)
    later = combine(odd.narrow(axis, 0, (size - 1) // 2), later)
    even = torch.cat((x.narrow(axis, 0, 1), later), axis)
    pairs = torch.stack((even.narrow(axis, 0, size // 2), odd), axis + 1)
    both = pairs.flatten(axis, axis + 1)
    return torch.cat((both, even.narrow(axis, size // 2, 1)), axis) if size % 2 else both


def _is_scanned(x: Any, axis: int) -> bool:
    """Returns whether a derivative may be needed and the number of combinations is known."""
    return x.is_floating_point() and isinstance(x.shape[axis], int)


def _extreme(function: Any) -> Any:
    combine = torch.maximum if function is torch.cummax else torch.minimum

    def extreme(x: Any, axis: int, avals: Avals) -> Any:
        if _is_scanned(x, axis):
            return _scan(combine, x, axis)
        if x.is_complex():
            return _complex_extreme(x, axis, greatest=function is torch.cummax)
        if avals.is_unsigned:
            return flip_sign_bit(function(flip_sign_bit(x, x.dtype), axis)[0], x.dtype)
        return function(x, axis)[0]

    return extreme


def _complex_extreme(x: Any, axis: int, *, greatest: bool) -> Any:
    """Computes running extremes by doubling: over the last two, four, eight elements."""
    step = 1
    while step < x.shape[axis]:
        size = x.shape[axis] - step
        before, here = x.narrow(axis, 0, size), x.narrow(axis, step, size)
        first = precedes(here, before) if greatest else precedes(before, here)
        x = torch.cat((x.narrow(axis, 0, step), torch.where(first, before, here)), axis)
        step *= 2
    return x


def _log_add(x: Any, y: Any) -> Any:
    """Computes `logaddexp`, whose slope is one if both are infinite, as in JAX."""
    same = (x == math.inf) & (y == math.inf)
    return torch.where(same, x + y, torch.logaddexp(x.masked_fill(same, 0), y.masked_fill(same, 0)))


def _log_sums(x: Any, axis: int, avals: Avals) -> Any:
    if _is_scanned(x, axis):
        return _scan(_log_add, x, axis)
    if x.is_floating_point() or x.is_complex():
        return torch.logcumsumexp(x, axis)
    if not x.shape[axis]:
        return x
    raise ConversionError(
        f"cumlogsumexp of {str(x.dtype).removeprefix('torch.')}: JAX has no answer for integers "
        'either. Cast them before it, as in x.astype("float32").'
    )


_cumulative("cumsum", _add(torch.cumsum))
_cumulative("cumprod", _add(torch.cumprod))
_cumulative("cummax", _extreme(torch.cummax))
_cumulative("cummin", _extreme(torch.cummin))
_cumulative("cumlogsumexp", _log_sums)
