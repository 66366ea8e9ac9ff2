"""Scattering: writes, adds or otherwise combines elements and windows at indices.

Windows that are not entirely within the operand are dropped, except in the mode `clip`. If several
windows write one element, the last one wins, as in JAX on a CPU: `_last_of_each` finds it, so that
the others get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fmapper import ConversionError
from fmapper.programs import Graph
from fmapper_adapters.torch.lax.layout import indices as _indices
from fmapper_adapters.torch.lax.layout.dims import (
    are_equal,
    flatten,
    inverse,
    permute,
    product,
    unflatten,
)
from fmapper_adapters.torch.lax.layout.indexing import index_tensors, places
from fmapper_adapters.torch.lax.reduce import element_functions
from fmapper_adapters.torch.lax.table import Avals, lax
from fmapper_adapters.torch.model.emit import current

_MOST_IN_TURN = 256  # the most updates that are applied one after the other


@dataclass
class Rows:
    """A scatter, rewritten as a scatter of rows.

    Attributes:
        operand: The operand, with all indexed dimensions flattened to the first.
        at: The row of each update, in one dimension.
        updates: The updates, one row each.
        valid: Which updates to write; None for all.
        distinct: Whether no two updates have the same row.
        whole: Reshapes an array like `operand` to the shape of the scatter's operand.
    """

    operand: Any
    at: Any
    updates: Any
    valid: Any
    distinct: bool
    whole: Callable[[Any], Any]

    @property
    def mask(self) -> Any:
        """`valid`, with dimensions of size 1 so that it broadcasts against the updates."""
        return _column(self.valid, self.updates)


def _column(x: Any, like: Any) -> Any:
    return x if like.ndim == 1 else x.view((-1, *[1] * (like.ndim - 1)))


def rows(
    x: Any,
    indices: Any,
    updates: Any,
    dimension_numbers: Any,
    mode: str,
    unique_indices: bool,
    avals: Avals,
) -> Rows:
    """Reads a scatter."""
    numbers = dimension_numbers
    batching = tuple(numbers["operand_batching_dims"])
    dropped = {*numbers["inserted_window_dims"], *batching}
    window_dims = tuple(numbers["update_window_dims"])
    kept = [d for d in range(x.ndim) if d not in dropped]
    place = dict(zip(kept, window_dims, strict=True))
    widths = [1 if d in dropped else updates.shape[place[d]] for d in range(x.ndim)]
    positions = places(
        x.shape,
        indices,
        avals.operands[1][0],
        widths,
        numbers["scatter_dims_to_operand_dims"],
        batching,
        numbers["scatter_indices_batching_dims"],
        dropped,
        checked=mode != "clip",
    )
    dims, tensors, wide = index_tensors(positions)
    rest = [d for d in range(x.ndim) if d not in dims]
    rank = len(positions.batch)
    batch_dims = [i for i in range(updates.ndim) if i not in window_dims]
    single = [place[d] for d in dims if d in place and d not in wide]
    order = [*batch_dims, *single, *(place[d] for d in wide), *(place[d] for d in rest)]
    updates = permute(updates, order)
    if single:
        updates = updates.squeeze(tuple(range(rank, rank + len(single))))
    lead = tuple(updates.shape[: rank + len(wide)])
    updates = flatten(updates, 0, len(lead))
    sizes = [x.shape[d] for d in dims]
    operand = flatten(permute(x, [*dims, *rest]), 0, len(dims))
    at = tensors[0] if tensors else 0
    for index, size in zip(tensors[1:], sizes[1:], strict=True):
        at = at * size + index
    at = (
        current().make(torch.full, (product(lead),), at) if isinstance(at, int) else _flat(at, lead)
    )
    valid = positions.valid
    if valid is not None:
        valid = valid.reshape((*valid.shape, *[1] * len(wide))) if wide else valid
        valid = _flat(valid, lead)

    def whole(result: Any) -> Any:
        return permute(unflatten(result, 0, sizes), inverse([*dims, *rest]))

    alone = are_equal(product(positions.batch), 1)
    return Rows(operand, at, updates, valid, unique_indices or alone, whole)


def _flat(x: Any, lead: tuple[Any, ...]) -> Any:
    """Broadcasts a tensor to the leading dimensions and flattens it."""
    if not lead:
        return x.reshape(1)
    x = x if tuple(x.shape) == lead else x.expand(lead)
    return flatten(x, 0, len(lead))


def write(scatter: Rows, updates: Any) -> Any:
    """Replaces rows of the operand; updates out of bounds go to an extra row."""
    at, operand = scatter.at, scatter.operand
    if scatter.valid is None and scatter.distinct:
        return torch.index_copy(operand, 0, at, updates)
    count = operand.shape[0]
    if scatter.valid is not None:
        at = torch.where(scatter.valid, at, count)
    if not scatter.distinct:
        at = torch.where(_last_of_each(at, count), at, count)
    padding = [0, 0] * (operand.ndim - 1) + [0, 1]
    longer = torch.constant_pad_nd(operand, padding, 0)
    return torch.narrow(torch.index_copy(longer, 0, at, updates), 0, 0, count)


def _last_of_each(at: Any, count: Any) -> Any:
    """Returns which updates are the last ones for their rows."""
    order = _indices.steps(at.shape[0])
    last = torch.scatter_reduce(at.new_full((count + 1,), -1), 0, at, order, "amax")
    return torch.index_select(last, 0, at) == order


def _replace(scatter: Rows, update: Graph | None, avals: Avals) -> Any:
    if update is None or _gives_the_update(update):
        return write(scatter, scatter.updates)
    if scatter.distinct:
        before = torch.index_select(scatter.operand, 0, scatter.at)
        (after,) = element_functions.apply(update, (before, scatter.updates))
        return write(scatter, after)
    return _in_turn(scatter, update)


def _gives_the_update(graph: Graph) -> bool:
    return getattr(graph.outputs[0], "name", None) == graph.inputs[1]


def _in_turn(scatter: Rows, graph: Graph) -> Any:
    """Applies updates by a function of elements, one after the other.

    Raises:
        ConversionError: There are too many updates.
    """
    count = scatter.at.shape[0]
    if not isinstance(count, int) or count > _MOST_IN_TURN:
        raise ConversionError(
            f"scatter with a custom function, for {count} indices that may be equal; pass "
            f"unique_indices=True if none are"
        )
    operand = scatter.operand
    for i in range(count):
        at = torch.narrow(scatter.at, 0, i, 1)
        before = torch.index_select(operand, 0, at)
        (after,) = element_functions.apply(graph, (before, torch.narrow(scatter.updates, 0, i, 1)))
        if scatter.valid is not None:
            after = torch.where(torch.narrow(scatter.mask, 0, i, 1), after, before)
        operand = torch.index_copy(operand, 0, at, after)
    return operand


Combine = Callable[[Rows, "Graph | None", Avals], Any]


def _register(name: str, combine: Combine) -> None:
    @lax(name, takes_avals=True)
    def lowering(
        x: Any,
        indices: Any,
        updates: Any,
        *,
        dimension_numbers: Any,
        mode: str,
        unique_indices: bool = False,
        indices_are_sorted: bool = False,
        update_jaxpr: Graph | None = None,
        update_consts: tuple[Any, ...] = (),
        avals: Avals,
    ) -> Any:
        if 0 in updates.shape or 0 in x.shape:
            return x
        scatter = rows(x, indices, updates, dimension_numbers, mode, unique_indices, avals)
        return scatter.whole(combine(scatter, update_jaxpr, avals))


def _add(scatter: Rows, update: Graph | None, avals: Avals, alpha: int = 1) -> Any:
    if scatter.operand.dtype is torch.bool:
        return _reduce(scatter, "amax", False)
    updates = scatter.updates
    if scatter.valid is not None:
        # -0.0 + 0.0 would be 0.0
        nothing = 0 if not updates.is_floating_point() else (-0.0 if alpha == 1 else 0.0)
        updates = torch.where(scatter.mask, updates, nothing)
    if alpha == 1:
        return torch.index_add(scatter.operand, 0, scatter.at, updates)
    return torch.index_add(scatter.operand, 0, scatter.at, updates, alpha=alpha)


def _subtract(scatter: Rows, update: Graph | None, avals: Avals) -> Any:
    return _add(scatter, update, avals, -1)


def _multiply(scatter: Rows, update: Graph | None, avals: Avals) -> Any:
    if scatter.operand.dtype is torch.bool:
        return _reduce(scatter, "amin", True)
    if scatter.operand.is_complex():
        return _combine_by(scatter, torch.mul)
    return _reduce(scatter, "prod", 1)


def _reduce(scatter: Rows, how: str, nothing: Any) -> Any:
    operand, updates = scatter.operand, scatter.updates
    if operand.dtype is torch.bool:
        operand, updates = operand.to(torch.uint8), updates.to(torch.uint8)
    if scatter.valid is not None:
        updates = torch.where(scatter.mask, updates, nothing)
    at = _column(scatter.at, updates)
    at = at.expand(updates.shape) if updates.ndim > 1 else at
    result = torch.scatter_reduce(operand, 0, at, updates, how)
    return result.to(torch.bool) if scatter.operand.dtype is torch.bool else result


def _extreme(how: str) -> Combine:
    def combine(scatter: Rows, update: Graph | None, avals: Avals) -> Any:
        dtype = scatter.operand.dtype
        largest = how == "amax"
        if dtype is torch.bool:
            return _reduce(scatter, how, not largest)
        if dtype.is_complex:
            return _combine_by(
                scatter, element_functions.larger if largest else element_functions.smaller
            )
        if dtype.is_floating_point:
            return _reduce(scatter, how, float("-inf") if largest else float("inf"))
        info = torch.iinfo(dtype)
        nothing = info.min if largest else info.max
        if not avals.is_unsigned:
            return _reduce(scatter, how, nothing)
        # flipping the first bit maps the order of unsigned to that of signed integers
        scatter.operand = scatter.operand ^ info.min
        scatter.updates = scatter.updates ^ info.min
        return _reduce(scatter, how, nothing) ^ info.min

    return combine


def _combine_by(scatter: Rows, combine: Callable[[Any, Any], Any]) -> Any:
    """Applies updates by an associative function that torch has no scatter for.

    Sorting brings updates of the same row together, and a scan by doubling combines them; the last
    update of each row then has the combination of all.
    """
    at = scatter.at
    count = scatter.operand.shape[0]
    if scatter.valid is not None:
        at = torch.where(scatter.valid, at, count)
    order = torch.argsort(at, stable=True)
    at, values = torch.index_select(at, 0, order), torch.index_select(scatter.updates, 0, order)
    total = at.shape[0]
    step = 1
    while step < total:
        rest = total - step
        same = torch.narrow(at, 0, step, rest) == torch.narrow(at, 0, 0, rest)
        late = torch.narrow(values, 0, step, rest)
        merged = combine(torch.narrow(values, 0, 0, rest), late)
        late = torch.where(_column(same, values), merged, late)
        values = torch.cat((torch.narrow(values, 0, 0, step), late))
        step *= 2
    padding = [0, 0] * (scatter.operand.ndim - 1) + [0, 1]
    longer = torch.constant_pad_nd(scatter.operand, padding, 0)
    values = combine(torch.index_select(longer, 0, at), values)
    at = torch.where(_last_of_each(at, count), at, count)
    return torch.narrow(torch.index_copy(longer, 0, at, values), 0, 0, count)


_register("scatter", _replace)
_register("scatter-add", _add)
_register("scatter-sub", _subtract)
_register("scatter-mul", _multiply)
_register("scatter-min", _extreme("amin"))
_register("scatter-max", _extreme("amax"))
