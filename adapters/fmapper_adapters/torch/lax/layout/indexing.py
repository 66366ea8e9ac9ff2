"""Gathering: elements and windows at computed positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fmapper_adapters.torch.lax import dimensions, types
from fmapper_adapters.torch.lax.layout import indices as _indices
from fmapper_adapters.torch.lax.layout.dims import are_equal, permute
from fmapper_adapters.torch.lax.table import Avals, lax


@dataclass
class Places:
    """The positions of windows in the operand of a gather or a scatter.

    Attributes:
        at: Dimension of the operand -> the indices along it: a number, or a tensor that broadcasts
            to the batch dimensions of the indices.
        widths: Indexed dimension that windows extend along -> their width. A width of 1 adds a
            dimension to the result.
        whole: Dimensions that windows cover.
        batching: Dimension of the operand -> the dimension of the indices that it is batched with.
        windows: All dimensions of windows, in order.
        batch: The sizes of the batch dimensions of the indices.
        valid: Which windows are in bounds; None if all are, or if this is not needed.
    """

    at: dict[int, Any] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    whole: list[int] = field(default_factory=list)
    batching: dict[int, int] = field(default_factory=dict)
    windows: list[int] = field(default_factory=list)
    batch: tuple[Any, ...] = ()
    valid: Any = None


def places(
    sizes: tuple[Any, ...],
    indices: Any,
    dtype: str,
    slice_sizes: Any,
    start_map: Any,
    batching: Any,
    index_batching: Any,
    dropped: Any,
    *,
    checked: bool,
) -> Places:
    """Reads the dimension numbers of a gather or a scatter.

    Args:
        sizes: The sizes of the operand.
        indices: The starts, with their components in the last dimension.
        dtype: The dtype of the indices in JAX.
        slice_sizes: The size of a window in each dimension of the operand.
        start_map: The dimension of the operand that each component indexes.
        batching: The batching dimensions of the operand.
        index_batching: The corresponding dimensions of the indices.
        dropped: Dimensions of the operand that windows lack.
        checked: Whether to compute which windows are in bounds.
    """
    positions = Places(batch=tuple(indices.shape[:-1]))
    components = _components(indices, len(start_map))
    for d, (size, width) in enumerate(zip(sizes, slice_sizes, strict=True)):
        if d in batching:
            place = index_batching[list(batching).index(d)]
            view = [1] * len(positions.batch)
            view[place] = -1
            positions.batching[d] = place
            positions.at[d] = (
                _indices.steps(size).view(view) if len(view) > 1 else _indices.steps(size)
            )
            continue
        if d not in dropped:
            positions.windows.append(d)
        if d not in start_map:
            if are_equal(size, width):
                positions.whole.append(d)
            else:
                positions.at[d], positions.widths[d] = 0, width
            continue
        raw = _indices.index(components[list(start_map).index(d)], dtype)
        if checked:
            high = size - width
            inside = raw == 0 if are_equal(size, width) else (raw >= 0) & (raw <= high)
            positions.valid = inside if positions.valid is None else positions.valid & inside
        if d not in dropped and are_equal(size, width):
            positions.whole.append(d)
            continue
        positions.at[d] = torch.clamp(raw, 0, size - width)
        if d not in dropped:
            positions.widths[d] = width
    return positions


def _components(indices: Any, count: int) -> list[Any]:
    """Returns the components of indices along the last dimension."""
    if count == 1:
        return [_without_last(indices)]
    node = indices.node
    if node.target is torch.cat and node.args[1] in (-1, indices.ndim - 1):
        parts = [type(indices)(part, indices.tracer) for part in node.args[0]]
        if all(part.fake.shape[-1] == 1 for part in parts):
            return [_without_last(part) for part in parts]
    unbound = torch.unbind(indices, -1)
    return [unbound[i] for i in range(count)]


def _without_last(x: Any) -> Any:
    """Drops the last dimension, of size 1."""
    node = x.node
    if node.op == "call_method" and node.target in ("unsqueeze", "reshape", "expand"):
        source = type(x)(node.args[0], x.tracer)
        if all(isinstance(n, int) for n in x.fake.shape) and source.shape == x.shape[:-1]:
            return source
    return x.squeeze(-1)


def index_tensors(positions: Places) -> tuple[list[int], list[Any], list[int]]:
    """Returns the indexed dimensions, an index for each, and the dimensions with a width above 1.

    The indices have the batch dimensions, followed by one for each width.
    """
    dims = sorted(positions.at)
    wide = [d for d in dims if not are_equal(positions.widths.get(d, 1), 1)]
    tensors = []
    for d in dims:
        at = positions.at[d]
        if d in wide:
            k = wide.index(d)
            reach = _indices.steps(positions.widths[d])
            reach = reach.view((-1, *[1] * (len(wide) - k - 1))) if k < len(wide) - 1 else reach
            tensors.append(_with_last(at, len(wide)) + reach)
        else:
            tensors.append(_with_last(at, len(wide)))
    return dims, tensors, wide


def _with_last(x: Any, count: int) -> Any:
    if isinstance(x, int) or not count:
        return x
    return x.unsqueeze(-1) if count == 1 else x[(..., *[None] * count)]


@lax("gather", takes_avals=True, dims=dimensions.gather)
def gather(
    x: Any,
    indices: Any,
    *,
    dimension_numbers: Any,
    slice_sizes: tuple[Any, ...],
    mode: str,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    fill_value: Any = None,
    avals: Avals,
) -> Any:
    numbers = dimension_numbers
    offsets = tuple(numbers["offset_dims"])
    batching = numbers["operand_batching_dims"]
    positions = places(
        x.shape,
        indices,
        avals.operands[1][0],
        slice_sizes,
        numbers["start_index_map"],
        batching,
        numbers["start_indices_batching_dims"],
        {*numbers["collapsed_slice_dims"], *batching},
        checked=mode in ("fill_or_drop", "fill"),
    )
    rank = len(positions.batch) + len(offsets)
    batch_places = [i for i in range(rank) if i not in offsets]
    result, labels = _take(x, positions)
    wanted: list[Any] = [None] * rank
    for place, d in zip(offsets, positions.windows, strict=True):
        wanted[place] = ("window", d)
    for i, place in enumerate(batch_places):
        wanted[place] = ("batch", i)
    result = permute(result, [labels.index(label) for label in wanted if label in labels])
    for place, label in enumerate(wanted):
        if label not in labels:
            result = result.unsqueeze(place)
    if positions.valid is None:
        return result
    mask = positions.valid
    if mask.ndim:
        for place in sorted(offsets):
            mask = mask.unsqueeze(place)
    return torch.where(mask, result, _fill_value(fill_value, avals.results[0][0]))


def _fill_value(value: Any, dtype: str) -> Any:
    if value is None:
        if dtype == "bool":
            return True
        if "float" in dtype or "complex" in dtype:
            return float("nan")
        if dtype.startswith("uint"):
            return -1 if types.is_carried(dtype) else 255
        return torch.iinfo(types.dtype_of(dtype)).min
    return types.carried_number(value, dtype)


def _take(x: Any, positions: Places) -> tuple[Any, list[Any]]:
    """Returns the windows, and the meaning of each of their dimensions."""
    dims, tensors, wide = index_tensors(positions)
    rank = len(positions.batch)
    batch = [("batch", i) for i in range(rank)]
    if not dims:
        sizes = (*positions.batch, *x.shape)
        return (x.expand(sizes) if rank else x), [*batch, *(("window", d) for d in range(x.ndim))]
    rest = [d for d in range(x.ndim) if d not in dims]
    if len(dims) == 1 and isinstance(positions.at[dims[0]], int):
        (d,) = dims
        x, labels = (
            torch.narrow(x, d, 0, positions.widths[d]),
            [("window", i) for i in range(x.ndim)],
        )
        return (x.expand((*positions.batch, *x.shape)) if rank else x), [*batch, *labels]
    if len(dims) == 1:
        return _take_along(x, dims[0], tensors[0], [*batch, *(("window", d) for d in wide)])
    along = _along_axis(positions, dims, rest)
    if along is not None:
        d, position = along
        order = dict(zip(positions.batching.values(), positions.batching, strict=True)) | {
            position: d
        }
        x = permute(x, [order[i] for i in range(rank)])
        return torch.gather(x, position, positions.at[d]), batch
    result = permute(x, [*dims, *rest])[tuple(tensors)]
    labels = [*batch, *(("window", d) for d in wide), *(("window", d) for d in rest)]
    return result, labels


def _take_along(x: Any, d: int, at: Any, middle: list[Any]) -> tuple[Any, list[Any]]:
    """Returns rows along one dimension, by an index of any shape."""
    before, after = range(d), range(d + 1, x.ndim)
    labels = [*(("window", i) for i in before), *middle, *(("window", i) for i in after)]
    if at.ndim == 1:
        return torch.index_select(x, d, at), labels
    if at.ndim == 0:
        return torch.index_select(x, d, at.unsqueeze(0)).squeeze(d), labels
    if d == 0 and x.ndim == 2 and x.is_floating_point():
        return torch.nn.functional.embedding(at, x), labels
    taken = torch.index_select(x, d, at.flatten())
    return taken.unflatten(d, tuple(at.shape)), labels


def _along_axis(positions: Places, dims: list[int], rest: list[int]) -> tuple[int, int] | None:
    """Recognises `torch.gather`: returns the dimension and its place, else None."""
    single = [d for d in dims if d not in positions.batching]
    if rest or len(single) != 1 or len(dims) != len(positions.batch) or len(dims) == 1:
        return None
    if isinstance(positions.at[single[0]], int) or not are_equal(
        positions.widths.get(single[0], 1), 1
    ):
        return None
    (place,) = set(range(len(dims))) - set(positions.batching.values())
    return single[0], place
