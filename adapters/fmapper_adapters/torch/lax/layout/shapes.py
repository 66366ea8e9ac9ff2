"""Shapes: operations that only move elements."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch.lax.layout import indices
from fmapper_adapters.torch.lax.layout.dims import are_equal, permute
from fmapper_adapters.torch.lax.table import Avals, along, dimensions, lax, permutes, regroups
from fmapper_adapters.torch.model.emit import VaryingSize


@lax("broadcast_in_dim", dims=dimensions.broadcast)
def broadcast_in_dim(
    x: Any, *, shape: tuple[Any, ...], broadcast_dimensions: tuple[int, ...]
) -> Any:
    sizes = list(x.shape)
    first = broadcast_dimensions[0] if broadcast_dimensions else len(shape)
    missing = [i for i in range(first, len(shape)) if i not in broadcast_dimensions]
    if len(missing) == 1:
        x = x.unsqueeze(missing[0] - first)
    elif missing and sizes:
        view: list[Any] = [1] * (len(shape) - first)
        for size, at in zip(sizes, broadcast_dimensions, strict=True):
            view[at - first] = size
        x = x.reshape(view)
    before = dict(zip(broadcast_dimensions, sizes, strict=True))
    grown = (
        first > 0
        or not sizes
        or any(
            not are_equal(n, 1) if i in missing else not are_equal(n, before[i])
            for i, n in enumerate(shape)
        )
    )
    return x.expand(shape) if grown and shape else x


@lax("reshape", dims=regroups)
def reshape(
    x: Any, *, new_sizes: tuple[Any, ...], dimensions: tuple[int, ...] | None = None
) -> Any:
    return permute(x, dimensions or range(x.ndim)).reshape(new_sizes)


@lax("squeeze", dims=regroups)
def squeeze(x: Any, *, dimensions: tuple[int, ...]) -> Any:
    if not dimensions:
        return x
    return x.squeeze(dimensions[0] if len(dimensions) == 1 else dimensions)


@lax("transpose", dims=permutes(lambda call, _: call.kwargs["permutation"]))
def transpose(x: Any, *, permutation: tuple[int, ...]) -> Any:
    return permute(x, permutation)


@lax("concatenate", dims=along("dimension"))
def concatenate(*xs: Any, dimension: int) -> Any:
    return torch.cat(xs, dimension) if len(xs) > 1 else xs[0]


@lax("stack")
def stack(*xs: Any, axis: int) -> Any:
    return torch.stack(xs, axis)


@lax("unstack", takes_avals=True)
def unstack(x: Any, *, axis: int, avals: Avals) -> Any:
    parts = torch.unbind(x, axis)
    return tuple(parts[i] for i in range(len(avals.results)))


@lax("split", dims=dimensions.split)
def split(x: Any, *, sizes: tuple[Any, ...], axis: int) -> Any:
    parts = torch.split(x, list(sizes), axis)
    return tuple(parts[i] for i in range(len(sizes)))


@lax("tile")
def tile(x: Any, *, reps: tuple[int, ...]) -> Any:
    return torch.tile(x, reps) if reps else x


@lax("rev", dims=along("dimensions"))
def rev(x: Any, *, dimensions: tuple[int, ...]) -> Any:
    return torch.flip(x, dimensions) if dimensions else x


@lax("slice", dims=dimensions.part)
def slice_(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any = None) -> Any:
    steps = strides or (1,) * len(start_indices)
    chosen = [
        d
        for d, (start, limit, step) in enumerate(
            zip(start_indices, limit_indices, steps, strict=True)
        )
        if not (are_equal(start, 0) and are_equal(limit, x.shape[d]) and step == 1)
    ]
    if not chosen:
        return x
    if len(chosen) == 1 and steps[chosen[0]] == 1:
        d = chosen[0]
        return torch.narrow(x, d, start_indices[d], limit_indices[d] - start_indices[d])
    wanted = [slice(None)] * (chosen[-1] + 1)
    for d in chosen:
        step = steps[d] if steps[d] != 1 else None
        wanted[d] = slice(start_indices[d], limit_indices[d], step)
    return x[tuple(wanted)]


@lax("dynamic_slice", takes_numbers=True, takes_avals=True, dims=dimensions.part)
def dynamic_slice(x: Any, *starts: Any, slice_sizes: tuple[Any, ...], avals: Avals) -> Any:
    for d, (start, count) in enumerate(zip(starts, slice_sizes, strict=True)):
        size = x.shape[d]
        if are_equal(size, count):
            continue
        first = indices.index(start, avals.operands[d + 1][0])
        at = 0 if isinstance(first, int) and first == 0 else indices.clamp(first, size - count)
        if isinstance(at, int):
            x = torch.narrow(x, d, at, count)
        else:
            x = torch.index_select(x, d, indices.window(at, count))
    return x


@lax("dynamic_update_slice", takes_numbers=True, takes_avals=True, dims=dimensions.part)
def dynamic_update_slice(x: Any, update: Any, *starts: Any, avals: Avals) -> Any:
    wanted = []
    for d, start in enumerate(starts):
        size, count = x.shape[d], update.shape[d]
        if not are_equal(size, count):
            first = indices.index(start, avals.operands[d + 2][0])
            wanted.append((d, indices.clamp(first, size - count), count))
    if 0 in update.shape:
        return x
    return _update(x, update, wanted)


def _update(x: Any, update: Any, wanted: list[tuple[int, Any, Any]]) -> Any:
    """Replaces a part of a tensor, and copies only the affected rows."""
    if not wanted:
        return update
    (d, at, count), *rest = wanted
    if isinstance(at, int):
        if rest:
            update = _update(torch.narrow(x, d, at, count), update, rest)
        return _scatter(x, update, d, at, at + count, 1)
    where = indices.window(at, count)
    if rest:
        update = _update(torch.index_select(x, d, where), update, rest)
    return torch.index_copy(x, d, where, update)


@lax("pad", takes_numbers=True, dims=dimensions.part)
def pad(x: Any, value: Any, *, padding_config: tuple[tuple[int, int, int], ...]) -> Any:
    return pad_with(x, value, padding_config)


def pad_with(x: Any, value: Any, config: Any) -> Any:
    """Pads a tensor before, after and between its elements; negative widths crop.

    Args:
        x: A tensor of any dtype.
        value: A number or a tensor without dimensions.
        config: For each dimension the padding before, after, and between elements.
    """
    config = [tuple(c) for c in config]
    if all(c == (0, 0, 0) for c in config):
        return x
    if any(_varies(n, *c) for n, c in zip(x.shape, config, strict=True)):
        for d, (_, _, inside) in enumerate(config):
            if inside:
                x = _pad_along(x, value, d, 0, 0, inside)
        return _pad_ends(x, value, [(low, high) for low, high, _ in config])
    simple = all(
        inside == 0 and (min(low, high) >= 0 or min(low, high, low + high) > -n)
        for (low, high, inside), n in zip(config, x.shape, strict=True)
    )
    if simple and isinstance(value, bool | int | float | complex):
        return _pad_ends(x, value, [(low, high) for low, high, _ in config])
    for d, (low, high, inside) in enumerate(config):
        if (low, high, inside) != (0, 0, 0):
            x = _pad_along(x, value, d, low, high, inside)
    return x


def _varies(*sizes: Any) -> bool:
    return any(isinstance(size, VaryingSize) for size in sizes)


def _pad_ends(x: Any, value: Any, config: list[tuple[Any, Any]]) -> Any:
    """Pads a tensor before and after its elements by widths that may vary; negative ones crop."""
    if all(pair == (0, 0) for pair in config):
        return x
    first = min(i for i, pair in enumerate(config) if pair != (0, 0))
    amounts = [n for pair in reversed(config[first:]) for n in pair]
    if isinstance(value, bool | int | float | complex):
        return torch.constant_pad_nd(x, amounts, value)
    is_element = torch.constant_pad_nd(torch.ones_like(x, dtype=torch.bool), amounts, 0)
    return torch.where(is_element, torch.constant_pad_nd(x, amounts, 0), value)


def _pad_along(x: Any, value: Any, d: int, low: int, high: int, inside: int) -> Any:
    size, step = x.shape[d], inside + 1
    if _varies(size):  # varying sizes are at least 1
        long = (size - 1) * step + 1
    else:
        long = low + max(size - 1, 0) * step + min(size, 1) + high
    if low >= 0 and high >= 0:
        first, count = 0, size
    else:  # negative padding: keeps the elements that stay within the result
        first = min(max(-(low // step), 0), size)
        count = max(min((long - 1 - low) // step + 1, size) - first, 0)
    shape = list(x.shape)
    shape[d] = long
    if isinstance(value, bool | int | float | complex):
        base = x.new_full(shape, value)
    else:
        base = value.expand(shape)
    if are_equal(count, 0):
        return base
    if not are_equal(count, size):
        x = torch.narrow(x, d, first, count)
    at = low + first * step
    return _scatter(base, x, d, at, at + (count - 1) * step + 1, step)


def _scatter(base: Any, x: Any, d: int, start: Any, stop: Any, step: int) -> Any:
    if not base.is_complex():
        return torch.slice_scatter(base, x, d, start, stop, step)
    # Torch differentiates this for real numbers only.
    pairs = torch.view_as_real(base.resolve_conj()), torch.view_as_real(x.resolve_conj())
    return torch.view_as_complex(torch.slice_scatter(*pairs, d, start, stop, step))
