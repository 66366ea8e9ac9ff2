"""Rules for the dimensions that operands and results of an ATen operation have in common.

Rules for meshes are derived from these. An operation that is not listed needs whole operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fmapper.meshes import DimensionRule, Dimensions, Dims
from fmapper.programs import Call

RULES: dict[str, DimensionRule] = {}


def _says(*names: str) -> Callable[[DimensionRule], DimensionRule]:
    def add(function: DimensionRule) -> DimensionRule:
        RULES.update((name if "::" in name else f"aten::{name}", function) for name in names)
        return function

    return add


def _argument(call: Call, at: int, name: str, default: Any = None) -> Any:
    return call.args[at] if len(call.args) > at else call.kwargs.get(name, default)


_POINTWISE = """
abs add alias bitwise_and bitwise_not bitwise_or clamp clamp_max clamp_min clone contiguous cos
detach div dropout elu eq erf exp expand expm1 full_like ge gelu gt hardsigmoid hardswish hardtanh
le leaky_relu log log1p log_sigmoid logical_and logical_not logical_or lt masked_fill maximum
minimum mish mul native_dropout ne neg ones_like pow reciprocal relu relu6 rsqrt rsub sigmoid silu
sin softplus sqrt square sub tanh to _to_copy where zeros_like fmapper::overwrite
fmapper::stop_gradient
"""
POINTWISE = frozenset(_POINTWISE.split())


@_says(*POINTWISE)
def _pointwise(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for operand in operands:
        for result in results:
            if operand is not None:
                own.align(operand, result)


@_says("new_ones", "new_zeros", "new_full", "new_empty")
def _new(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Returns new dimensions: only the dtype of the operand counts."""


@_says("linear")
def _linear(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, w, *bias = operands
    (y,) = results
    own.align(x[:-1], y[:-1])
    own.contract(x[-1], w[-1], call)
    own.join(w[0], y[-1])
    if bias and bias[0]:
        own.join(bias[0][0], y[-1])


@_says("matmul", "mm", "bmm", "mv", "dot")
def _matmul(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    a, b = operands
    (y,) = results
    own.contract(a[-1], b[-2] if len(b) > 1 else b[-1], call)
    rows = [*a[:-1]]
    if len(b) > 1:
        own.join(b[-1], y[-1])
        own.align(b[:-2], y[:-2])
        own.align(rows, y[:-1])
    else:
        own.align(rows, y)


@_says("addmm", "baddbmm")
def _addmm(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    bias, *factors = operands
    _matmul(own, call, factors[:2], results)
    if bias:
        own.align(bias, results[0])


@_says("embedding")
def _embedding(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    weight, indices = operands[:2]
    (y,) = results
    own.align(indices, y[:-1])
    own.join(weight[1], y[-1])
    own.look_up(weight[0], call)


@_says("scaled_dot_product_attention")
def _attention(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    q, k, v, *mask = operands
    (y,) = results
    own.align(q[:-1], y[:-1])
    own.join(v[-1], y[-1])
    own.align(k[:-2], v[:-2])
    for at, dim in enumerate(k[:-2]):
        if len(k) == len(q):
            own.join(dim, q[at])  # with fewer heads the first of those that share one
    own.contract(q[-1], k[-1], call)
    own.contract(k[-2], v[-2], call)
    own.need([k[-2]], call)
    if mask and mask[0]:
        own.align(mask[0], [*q[:-1], k[-2]])


@_says("conv1d", "conv2d", "conv3d", "convolution")
def _convolution(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, w, *bias = operands
    (y,) = results
    groups = _argument(call, 8 if call.op.startswith("aten::convolution") else 6, "groups", 1)
    if len(x) == len(y):
        own.join(x[0], y[0])
    own.join(w[0], y[1 - len(w)])
    if groups == 1:
        own.contract(x[1 - len(w)], w[1], call)
    elif groups == own.size(x[1 - len(w)]) == own.size(w[0]):
        own.join(x[1 - len(w)], w[0])
    else:
        own.need([x[1 - len(w)], w[0], w[1]], call)
    own.need([*x[2 - len(w) :], *y[2 - len(w) :], *w[2:]], call)
    if bias and bias[0]:
        own.join(bias[0][0], w[0])


@_says("_native_batch_norm_legit_no_training", "batch_norm", "_native_batch_norm_legit")
def _batch_norm(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, *others = operands
    own.align(x, results[0])
    for other in others:
        if other and len(other) == 1:
            own.join(other[0], x[1])


@_says("layer_norm", "rms_norm", "native_layer_norm")
def _layer_norm(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, *others = operands
    own.align(x, results[0])
    for other in others:
        if other:
            own.align(other, x)
    count = len(_argument(call, 1, "normalized_shape", (0,)))
    for dim in x[len(x) - count :]:
        own.sum(dim, call)


@_says("mean", "sum", "amax", "amin", "prod", "var", "std", "var_mean")
def _reduce(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x = operands[0]
    asked = _argument(call, 1, "dim", ())
    if asked is None or asked == () or call.op.endswith(".default"):
        gone = set(range(len(x)))
    else:
        gone = {at % len(x) for at in (asked if isinstance(asked, tuple) else (asked,))}
    for at in gone:
        own.sum(x[at], call)
    kept = len(results[0]) == len(x)
    rest = [d for at, d in enumerate(x) if kept or at not in gone]
    own.align(rest, results[0])


@_says("max_pool2d_with_indices", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "max_pool1d",
       "avg_pool1d", "adaptive_avg_pool1d")  # fmt: skip
def _pool(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x = operands[0]
    for result in results:
        count = 1 if "1d" in call.op else 2
        own.align(x[:-count], result[:-count])
        own.need([*x[-count:], *result[-count:]], call)


@_says("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum")
def _along(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x = operands[0]
    own.align(x, results[0])
    own.need([x[_argument(call, 1, "dim", -1)]], call)


@_says("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
def _reshape(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    own.regroup(operands[0], results[0], call)


@_says("repeat_interleave")
def _repeat(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, (y,) = operands[0], results
    if len(x) == len(y) and isinstance(_argument(call, 1, "repeats"), int):
        for a, b in zip(x, y, strict=True):
            own.join(a, b)
    else:
        own.need([*x, *y], call)


@_says("permute")
def _permute(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for at, dim in enumerate(_argument(call, 1, "dims")):
        own.join(operands[0][dim], results[0][at])


@_says("transpose")
def _transpose(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    order = [*operands[0]]
    a, b = call.args[1:3]
    order[a], order[b] = order[b], order[a]
    own.align(order, results[0])


@_says("t")
def _t(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    own.align(operands[0][::-1], results[0])


@_says("slice", "select", "index_select", "gather", "narrow")
def _part(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, (y,) = operands[0], results
    at = _argument(call, 1, "dim", 0) % len(x)
    rest = [d for i, d in enumerate(x) if i != at]
    kept = [d for i, d in enumerate(y) if i != at] if len(y) == len(x) else y
    for a, b in zip(rest, kept, strict=True):
        own.join(a, b)
    is_slice = "slice" in call.op and _argument(call, 4, "step", 1) == 1
    start = (_argument(call, 2, "start") or 0) if is_slice else None
    if is_slice and own.size(y[at]) == own.size(x[at]):
        own.join(x[at], y[at])
    elif isinstance(start, int) and isinstance(size := own.size(x[at]), int):
        own.cut(x[at], y[at], max(0, start + size if start < 0 else start), call)
    else:
        own.need([x[at], *([y[at]] if len(y) == len(x) else ())], call)


@_says("index")
def _index(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, indices = operands[:2]
    (y,) = results
    if indices and len(indices) == 1 and indices[0]:
        own.need([x[0]], call)
        for a, b in zip(x[1:], y[len(y) - len(x) + 1 :], strict=True):
            own.join(a, b)
        return
    given = [at for at, index in enumerate(call.args[1]) if index is not None]
    if len(given) != 1:
        own.need([*x, *y], call)
        return
    (at,) = given  # the dimensions around it are not touched
    own.need([x[at]], call)
    behind = len(x) - at - 1
    for a, b in zip([*x[:at], *x[at + 1 :]], [*y[:at], *y[len(y) - behind :]], strict=True):
        own.join(a, b)


@_says("cat")
def _cat(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    (y,) = results
    at = _argument(call, 1, "dim", 0) % len(y)
    parts = [part for part in operands[0] or () if part and len(part) == len(y)]
    own.need([dims[at] for dims in (y, *parts)], call)
    for part in parts:
        _join_but(own, at, part, y)


@_says("split_with_sizes", "split", "chunk")
def _split(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x = operands[0]
    at = _argument(call, 2, "dim", 0) % len(x)
    start = 0
    for part in results:  # what was packed in one array, as the gate of a perceptron beside it
        _join_but(own, at, x, part)
        size = own.size(part[at])
        if isinstance(start, int) and isinstance(size, int):
            own.cut(x[at], part[at], start, call)
            start += size
        else:
            own.need([x[at], part[at]], call)


def _join_but(own: Dimensions, at: int, a: Dims, b: Dims) -> None:
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if i != at:
            own.join(x, y)


@_says("fmapper::with_gradient")
def _with_gradient(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for y, result in zip(operands[0], results, strict=True):
        own.align(y, result)


@_says("transformers::grouped_mm_fallback", "_grouped_mm", "fmapper::grouped_mm")
def _group(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, w = operands[:2]
    (y,) = results
    own.expert(w[0])
    own.contract(x[-1], w[-2], call)
    own.join(w[-1], y[-1])
    own.join(x[0], y[0])
    own.need([x[0]], call)
