"""Comparisons and selection of elements."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax.pointwise.numbers import (
    as_tensor,
    flip_sign_bit,
    is_number,
    total_order,
)
from fmapper_adapters.torch.lax.table import Avals, lax, pointwise
from fmapper_adapters.torch.model.emit import current

_SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _comparison(name: str) -> Any:
    straight, swapped = getattr(torch, name), getattr(torch, _SWAPPED[name])

    def compare(x: Any, y: Any, *, avals: Avals) -> Any:
        tensor = y if is_number(x) else x
        if name not in ("eq", "ne"):
            if tensor.is_complex():
                return _complex(straight, as_tensor(x, tensor), as_tensor(y, tensor))
            if avals.is_unsigned:
                x, y = flip_sign_bit(x, tensor.dtype), flip_sign_bit(y, tensor.dtype)
        return swapped(y, x) if is_number(x) else straight(x, y)

    return compare


def _complex(compare: Any, x: Any, y: Any) -> Any:
    """Compares by real parts, and by imaginary parts if these are equal."""
    real, other = torch.real(x), torch.real(y)
    return torch.where(real == other, compare(torch.imag(x), torch.imag(y)), compare(real, other))


for _name in _SWAPPED:
    lax(_name, takes_numbers=True, takes_avals=True, dims=pointwise)(_comparison(_name))


def _total(name: str) -> Any:
    compare = _comparison(name)

    def compare_total(x: Any, y: Any, *, avals: Avals) -> Any:
        x, y = as_tensor(x, y), as_tensor(y, x)
        return compare(total_order(x), total_order(y), avals=avals)

    return compare_total


for _name in ("eq", "lt", "le"):
    lax(f"{_name}_to", takes_numbers=True, takes_avals=True)(_total(_name))


@lax("select_n", takes_numbers=True, takes_avals=True, dims=pointwise)
def select_n(which: Any, *cases: Any, avals: Avals) -> Any:
    tensors = [case for case in cases if not is_number(case)]
    if is_number(which):  # all cases have the shape of the result
        return as_tensor(cases[min(max(int(which), 0), len(cases) - 1)], tensors[0])
    if not tensors:
        dtype = current().dtype(avals.results[0][0])
        cases = (which.new_full((), cases[0], dtype=dtype), *cases[1:])
    if len(cases) == 1:
        return cases[0]
    if which.dtype is torch.bool:
        return torch.where(which, cases[1], cases[0])
    chosen = cases[0]
    for i, case in enumerate(cases[1:], 1):
        chosen = torch.where(which >= i, case, chosen)
    return chosen
