"""Rules for the dimensions of single JAX primitives: the `dims` of their lowerings."""

from __future__ import annotations

from typing import Any

from fmapper.meshes import Dimensions, Dims, keep_but
from fmapper.programs import Call


def dot_general(
    dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]
) -> None:
    """Sums over contracted dimensions, and keeps the others."""
    a, b = operands
    (y,) = results
    (over_a, over_b), (batch_a, batch_b) = call.kwargs["dimension_numbers"]
    for i, j in zip(over_a, over_b, strict=True):
        dimensions.contract(a[i], b[j], call)
    for i, j, dim in zip(batch_a, batch_b, y[: len(batch_a)], strict=True):
        dimensions.join(a[i], dim)
        dimensions.join(b[j], dim)
    free = [d for i, d in enumerate(a) if i not in {*over_a, *batch_a}]
    free += [d for j, d in enumerate(b) if j not in {*over_b, *batch_b}]
    for old, new in zip(free, y[len(batch_a) :], strict=True):
        dimensions.join(old, new)


def convolution(
    dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]
) -> None:
    """Sums over input channels; spatial dimensions must not be divided."""
    numbers = call.kwargs["dimension_numbers"]
    batch, channels, *space = (operands[0][at] for at in numbers["lhs_spec"])
    out, each, *kernel = (operands[1][at] for at in numbers["rhs_spec"])
    first, features, *places = (results[0][at] for at in numbers["out_spec"])
    if call.kwargs["batch_group_count"] != 1:
        raise ValueError("the convolution groups the batch")
    dimensions.join(batch, first)
    dimensions.join(out, features)
    groups = call.kwargs["feature_group_count"]
    if groups == 1:
        dimensions.contract(channels, each, call)
    elif groups == dimensions.size(channels) == dimensions.size(out):
        dimensions.join(channels, out)
    else:
        dimensions.need([channels, out, each], call)
    dimensions.need([*space, *kernel, *places], call)


def gather(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Looks up slices, and keeps dimensions that these cover."""
    x, indices = operands
    (y,) = results
    numbers, sizes = call.kwargs["dimension_numbers"], call.kwargs["slice_sizes"]
    offsets, gone = numbers["offset_dims"], numbers["collapsed_slice_dims"]
    if numbers["operand_batching_dims"] or indices is None:
        raise ValueError("the elements that are read depend on the row")
    kept = [(d, n) for at, (d, n) in enumerate(zip(x, sizes, strict=True)) if at not in gone]
    for (dim, count), at in zip(kept, offsets, strict=True):
        if count == dimensions.size(dim):
            dimensions.join(dim, y[at])
        else:
            dimensions.need([dim, y[at]], call)
    for at in gone:
        dimensions.look_up(x[at], call)
    rest = [d for at, d in enumerate(y) if at not in offsets]
    for old, new in zip(indices[:-1], rest, strict=True):
        dimensions.join(old, new)


def broadcast(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Keeps dimensions whose size does not change."""
    for old, at in zip(operands[0], call.kwargs["broadcast_dimensions"], strict=True):
        if dimensions.size(old) == dimensions.size(results[0][at]):
            dimensions.join(old, results[0][at])


def part(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Returns or changes part of an array, and keeps dimensions whose size does not change."""
    parts = [operands[0], *(o for o in operands[1:] if o and len(o) == len(results[0]))]
    for x in parts:
        cut = {
            at for at, d in enumerate(x) if dimensions.size(d) != dimensions.size(results[0][at])
        }
        keep_but(dimensions, call, [x], results, cut)


def window(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Keeps dimensions without windows; those with windows must not be divided."""
    windows = call.kwargs["window_dimensions"]
    keep_but(
        dimensions, call, operands[:1], results, {at for at, n in enumerate(windows) if n != 1}
    )


def split(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Cuts one dimension into parts."""
    (x,), at = operands, call.kwargs["axis"]
    even = len({dimensions.size(part[at]) for part in results}) == 1
    keep_but(dimensions, call, operands, results, () if even else {at})
    if even:  # packed arrays, such as the gate and up of an MLP
        dimensions.move(x[at], call)


def inner(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Follows a function that is called as a whole."""
    for new, result in zip(
        dimensions.inside(call.kwargs["call_jaxpr"], operands), results, strict=True
    ):
        _join_all(dimensions, new, result)


def scan(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Follows a loop over the first dimension of arrays, such as stacked layers."""
    graph, length = call.kwargs["jaxpr"], call.kwargs["length"]
    first = call.kwargs["num_consts"]
    rest = first + call.kwargs["num_carry"]
    for stack in (*operands[rest:], *results[rest - first :]):
        dimensions.need(stack[:1], call)
    rows = [stack[1:] for stack in operands[rest:]]
    outputs = dimensions.inside(graph, [*operands[:rest], *rows], times=length)
    for at, new in enumerate(outputs):
        is_carry = at < rest - first
        _join_all(dimensions, new, results[at] if is_carry else results[at][1:])
        if is_carry and operands[first + at] is not None:
            _join_all(dimensions, new, operands[first + at])


def _join_all(dimensions: Dimensions, new: Any, result: Dims) -> None:
    """Joins the dimensions of an inner graph's output with those of a result."""
    for a, b in zip(new or (), result, strict=bool(new)):
        dimensions.join(a, b)
