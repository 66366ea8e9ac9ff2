"""Rules for the dimensions that operands and results of a JAX primitive have in common.

Rules for meshes are derived from these. A primitive that is not listed needs whole operands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from fmapper.meshes import DimensionRule, Dimensions, Dims
from fmapper.programs import Call

RULES: dict[str, DimensionRule] = {}
_BODIES = ("call_jaxpr", "fun_jaxpr", "jaxpr")  # which keywords primitives have for what they call


def _says(names: str) -> Callable[[DimensionRule], DimensionRule]:
    def add(function: DimensionRule) -> DimensionRule:
        RULES.update((f"lax::{name}", function) for name in names.split())
        return function

    return add


@_says("""
abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos
cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log
log1p logistic lt max min mul ne neg nextafter not or pow reduce_precision rem round rsqrt select_n
sign sin sinh sqrt square stop_gradient sub tan tanh xor
""")
def _pointwise(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for operand in operands:
        if operand is not None:
            own.align(operand, results[0])


@_says("dot_general")
def _dot_general(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    a, b = operands
    (y,) = results
    (over_a, over_b), (batch_a, batch_b) = call.kwargs["dimension_numbers"]
    for i, j in zip(over_a, over_b, strict=True):
        own.contract(a[i], b[j], call)
    for i, j, dim in zip(batch_a, batch_b, y[: len(batch_a)], strict=True):
        own.join(a[i], dim)
        own.join(b[j], dim)
    free = [d for i, d in enumerate(a) if i not in {*over_a, *batch_a}]
    free += [d for j, d in enumerate(b) if j not in {*over_b, *batch_b}]
    for old, new in zip(free, y[len(batch_a) :], strict=True):
        own.join(old, new)


@_says("conv_general_dilated")
def _convolution(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    numbers = call.kwargs["dimension_numbers"]
    batch, channels, *space = (operands[0][at] for at in numbers["lhs_spec"])
    out, each, *kernel = (operands[1][at] for at in numbers["rhs_spec"])
    first, features, *places = (results[0][at] for at in numbers["out_spec"])
    if call.kwargs["batch_group_count"] != 1:
        raise ValueError("the convolution groups the batch")
    own.join(batch, first)
    own.join(out, features)
    groups = call.kwargs["feature_group_count"]
    if groups == 1:
        own.contract(channels, each, call)
    elif groups == own.size(channels) == own.size(out):
        own.join(channels, out)
    else:
        own.need([channels, out, each], call)
    own.need([*space, *kernel, *places], call)


@_says("gather")
def _gather(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, indices = operands
    (y,) = results
    numbers, sizes = call.kwargs["dimension_numbers"], call.kwargs["slice_sizes"]
    offsets, gone = numbers["offset_dims"], numbers["collapsed_slice_dims"]
    if numbers["operand_batching_dims"] or indices is None:
        raise ValueError("the elements that are read depend on the row")
    kept = [(d, n) for at, (d, n) in enumerate(zip(x, sizes, strict=True)) if at not in gone]
    for (dim, count), at in zip(kept, offsets, strict=True):
        if count == own.size(dim):
            own.join(dim, y[at])
        else:
            own.need([dim, y[at]], call)
    for at in gone:
        own.look_up(x[at], call)
    rest = [d for at, d in enumerate(y) if at not in offsets]
    for old, new in zip(indices[:-1], rest, strict=True):
        own.join(old, new)


@_says("""
reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin
""")
def _reduce(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    (x,) = operands
    gone = call.kwargs["axes"]
    for at in gone:
        own.sum(x[at], call)
    rest = [d for at, d in enumerate(x) if at not in gone]
    for old, new in zip(rest, results[0], strict=True):
        own.join(old, new)


@_says("reshape squeeze expand_dims")
def _reshape(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    own.regroup(operands[0], results[0], call)


@_says("broadcast_in_dim")
def _broadcast(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for old, at in zip(operands[0], call.kwargs["broadcast_dimensions"], strict=True):
        _join_whole(own, old, results[0][at])


@_says("transpose")
def _transpose(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for at, new in zip(call.kwargs["permutation"], results[0], strict=True):
        own.join(operands[0][at], new)


@_says("cumsum cumprod cummax cummin cumlogsumexp")
def _cumulative(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    _along(own, call, operands[0], results, {call.kwargs["axis"]})


@_says("sort")
def _sort(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for x in operands:
        _along(own, call, x, results, {call.kwargs["dimension"]})


@_says("top_k")
def _top_k(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    _along(own, call, operands[0], results, {call.kwargs.get("axis", len(operands[0]) - 1)})


@_says("rev")
def _reverse(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    _along(own, call, operands[0], results, call.kwargs["dimensions"])


@_says("slice dynamic_slice dynamic_update_slice pad")
def _part(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Returns or changes part of an array: what keeps its size is all there."""
    parts = [operands[0], *(o for o in operands[1:] if o and len(o) == len(results[0]))]
    for part in parts:
        cut = {at for at, d in enumerate(part) if own.size(d) != own.size(results[0][at])}
        _along(own, call, part, results, cut)


@_says("reduce_window reduce_window_sum reduce_window_max reduce_window_min")
def _window(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    windows = call.kwargs["window_dimensions"]
    _along(own, call, operands[0], results, {at for at, n in enumerate(windows) if n != 1})


@_says("concatenate")
def _concatenate(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for part in operands:
        _along(own, call, part, results, {call.kwargs["dimension"]})


@_says("split")
def _split(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    (x,), at = operands, call.kwargs["axis"]
    even = len({own.size(part[at]) for part in results}) == 1
    _along(own, call, x, results, () if even else {at})
    if even:  # what was packed in one array, as the gate of a perceptron beside it
        own.move(x[at], call)


@_says("custom_jvp_call custom_vjp_call jit pjit closed_call core_call remat checkpoint")
def _inner(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Follows a function that is called as a whole."""
    graph = next(call.kwargs[name] for name in _BODIES if name in call.kwargs)
    for new, result in zip(own.inside(graph, operands), results, strict=True):
        _join_all(own, new, result)


@_says("scan")
def _scan(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Follows a loop over the first dimension of arrays, such as layers that are stacked."""
    graph, length = call.kwargs["jaxpr"], call.kwargs["length"]
    first = call.kwargs["num_consts"]
    rest = first + call.kwargs["num_carry"]
    for stack in (*operands[rest:], *results[rest - first :]):
        own.need(stack[:1], call)
    rows = [stack[1:] for stack in operands[rest:]]
    outputs = own.inside(graph, [*operands[:rest], *rows], times=length)
    for at, new in enumerate(outputs):
        is_carry = at < rest - first
        _join_all(own, new, results[at] if is_carry else results[at][1:])
        if is_carry and operands[first + at] is not None:
            _join_all(own, new, operands[first + at])


def _join_all(own: Dimensions, new: Any, result: Dims) -> None:
    """Joins the dimensions of what an inner graph returns with those of a result."""
    for a, b in zip(new or (), result, strict=bool(new)):
        own.join(a, b)


def _along(
    own: Dimensions, call: Call, x: Dims, results: list[Dims], whole: Collection[int]
) -> None:
    """Joins each dimension with that of the results, but for those that are needed whole."""
    for y in results:
        for at, (old, new) in enumerate(zip(x, y, strict=True)):
            if at in whole:
                own.need([old, new], call)
            else:
                own.join(old, new)


def _join_whole(own: Dimensions, old: int, new: int) -> None:
    if own.size(old) == own.size(new):
        own.join(old, new)
