"""Sums, products, maxima and the like of all elements so far."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import ConversionError
from fmapper_adapters.torch.lax.pointwise.numbers import flip_sign_bit, precedes
from fmapper_adapters.torch.lax.table import Avals, lax


def _cumulative(name: str, function: Any) -> None:
    def cumulative(x: Any, *, axis: int, reverse: bool, avals: Avals) -> Any:
        if reverse:
            x = torch.flip(x, (axis,))
        found = function(x, axis, avals)
        return torch.flip(found, (axis,)) if reverse else found

    lax(name, takes_avals=True)(cumulative)


def _add(function: Any) -> Any:
    def add(x: Any, axis: int, avals: Avals) -> Any:
        if x.is_floating_point() or x.is_complex():
            return function(x, axis)
        return function(x, axis, dtype=x.dtype)  # which wraps; torch would widen it

    return add


def _extreme(function: Any) -> Any:
    def extreme(x: Any, axis: int, avals: Avals) -> Any:
        if x.is_complex():
            return _complex_extreme(x, axis, greatest=function is torch.cummax)
        if avals.is_unsigned:
            return flip_sign_bit(function(flip_sign_bit(x, x.dtype), axis)[0], x.dtype)
        return function(x, axis)[0]

    return extreme


def _complex_extreme(x: Any, axis: int, *, greatest: bool) -> Any:
    """Computes running extremes by doubling: over two, four, eight elements up to each."""
    step = 1
    while step < x.shape[axis]:
        size = x.shape[axis] - step
        before, here = x.narrow(axis, 0, size), x.narrow(axis, step, size)
        first = precedes(here, before) if greatest else precedes(before, here)
        x = torch.cat((x.narrow(axis, 0, step), torch.where(first, before, here)), axis)
        step *= 2
    return x


def _log_sums(x: Any, axis: int, avals: Avals) -> Any:
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
