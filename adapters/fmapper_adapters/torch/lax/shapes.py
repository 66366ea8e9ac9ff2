"""Shapes: what only says where elements are."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax._table import lax


@lax("broadcast_in_dim")
def broadcast_in_dim(
    x: Any, *, shape: tuple[Any, ...], broadcast_dimensions: tuple[int, ...]
) -> Any:
    view: list[Any] = [1] * len(shape)
    for size, at in zip(x.shape, broadcast_dimensions, strict=True):
        view[at] = size
    return x.reshape(view).expand(shape)


@lax("reshape")
def reshape(x: Any, *, new_sizes: tuple[Any, ...]) -> Any:
    return x.reshape(new_sizes)


@lax("squeeze")
def squeeze(x: Any, *, dimensions: tuple[int, ...]) -> Any:
    return x.squeeze(dimensions)


@lax("transpose")
def transpose(x: Any, *, permutation: tuple[int, ...]) -> Any:
    return x.permute(permutation)


@lax("concatenate")
def concatenate(*xs: Any, dimension: int) -> Any:
    return torch.cat(xs, dimension)


@lax("slice")
def slice_(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any = None) -> Any:
    steps = strides or (1,) * len(start_indices)
    return x[
        tuple(slice(a, b, s) for a, b, s in zip(start_indices, limit_indices, steps, strict=True))
    ]
