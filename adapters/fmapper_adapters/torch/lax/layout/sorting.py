"""Sorting, and the largest elements."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax.pointwise.numbers import flip_sign_bit, total_order
from fmapper_adapters.torch.lax.table import Avals, along, lax
from fmapper_adapters.torch.model.emit import current


@lax("sort", takes_avals=True, dims=along("dimension"))
def sort(*xs: Any, dimension: int, is_stable: bool, num_keys: int, avals: Avals) -> Any:
    """Returns arrays sorted by the first ones; equal elements stay in order, NaN come last."""
    kinds = [dtype for dtype, _ in avals.operands]
    if len(xs) == 1 and not xs[0].is_complex():
        flip = kinds[0] in ("uint16", "uint32", "uint64")
        x = flip_sign_bit(xs[0], xs[0].dtype) if flip else xs[0]
        result = torch.sort(x, dim=dimension, stable=True)[0]
        return (flip_sign_bit(result, x.dtype) if flip else result,)
    keys = [key for i in range(num_keys) for key in _keys(xs[i], kinds[i])]
    order: Any = None
    for key in reversed(keys):
        if order is None:
            order = torch.sort(key, dim=dimension, stable=True)[1]
        else:
            moved = torch.sort(torch.gather(key, dimension, order), dim=dimension, stable=True)[1]
            order = torch.gather(order, dimension, moved)
    return tuple(torch.gather(x, dimension, order) for x in xs)


def _keys(x: Any, kind: str) -> list[Any]:
    """Returns sort keys for tensors that torch cannot sort."""
    x = x.detach()
    if x.is_complex():
        return [torch.real(x), torch.imag(x)]
    return [flip_sign_bit(x, x.dtype) if kind in ("uint16", "uint32", "uint64") else x]


@lax("top_k", takes_avals=True, dims=along("axis"))
def top_k(x: Any, *, k: int, axis: int = -1, is_stable: bool = True, avals: Avals) -> Any:
    return _largest(x, k, axis, avals)


def _largest(x: Any, k: int, axis: int, avals: Avals) -> Any:
    """Returns the largest elements in the total order, and their indices; ties stay in order."""
    key = flip_sign_bit(x, x.dtype) if avals.is_unsigned else total_order(x.detach())
    at = torch.sort(key, dim=axis, descending=True, stable=True)[1].narrow(axis, 0, k)
    return torch.gather(x, axis, at), at.to(current().dtype(avals.results[1][0]))


@lax("approx_top_k", takes_avals=True)
def approx_top_k(
    x: Any,
    *,
    k: int,
    reduction_dimension: int,
    recall_target: float,
    is_max_k: bool,
    reduction_input_size_override: int,
    aggregate_to_topk: bool,
    avals: Avals,
) -> Any:
    """Returns the k largest or smallest elements, exactly."""
    values, at = torch.sort(x, dim=reduction_dimension, descending=is_max_k, stable=True)
    values = values.narrow(reduction_dimension, 0, k)
    at = at.narrow(reduction_dimension, 0, k)
    return values, at.to(current().dtype(avals.results[1][0]))
