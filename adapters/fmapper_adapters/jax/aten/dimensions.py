"""Rules for the dimensions of single ATen operations: the `dims` of their lowerings."""

from __future__ import annotations

from typing import Any

from fmapper.meshes import Dimensions, Dims, argument, permutes
from fmapper.programs import Call


def linear(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Sums over features; the outputs are the rows of the weight."""
    x, w, *bias = operands
    (y,) = results
    own.align(x[:-1], y[:-1])
    own.contract(x[-1], w[-1], call)
    own.join(w[0], y[-1])
    if bias and bias[0]:
        own.join(bias[0][0], y[-1])


def matmul(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Sums over the columns of one matrix and the rows of the other."""
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


def addmm(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Adds a bias to a product of matrices."""
    bias, *factors = operands
    matmul(own, call, factors[:2], results)
    if bias:
        own.align(bias, results[0])


def embedding(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Looks rows up."""
    weight, indices = operands[:2]
    (y,) = results
    own.align(indices, y[:-1])
    own.join(weight[1], y[-1])
    own.look_up(weight[0], call)


def attention(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Keeps batches, heads and queries; sums over keys."""
    q, k, v, *mask = operands
    (y,) = results
    own.align(q[:-1], y[:-1])
    own.join(v[-1], y[-1])
    own.align(k[:-2], v[:-2])
    for at, dim in enumerate(k[:-2]):
        if len(k) == len(q):
            own.join(dim, q[at])  # with fewer heads, the first of those that share a head
    own.contract(q[-1], k[-1], call)
    own.contract(k[-2], v[-2], call)
    own.need([k[-2]], call)
    if mask and mask[0]:
        own.align(mask[0], [*q[:-1], k[-2]])


def convolution(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Sums over input channels; spatial dimensions must not be divided."""
    x, w, *bias = operands
    (y,) = results
    groups = argument(call, "groups", 8 if call.op.startswith("aten::convolution") else 6, 1)
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


def batch_norm(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Keeps all dimensions; the other operands have the dimension of the channels."""
    x, *others = operands
    own.align(x, results[0])
    for other in others:
        if other and len(other) == 1:
            own.join(other[0], x[1])


def layer_norm(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Sums over the last dimensions, and keeps them."""
    x, *others = operands
    own.align(x, results[0])
    for other in others:
        if other:
            own.align(other, x)
    count = len(argument(call, "normalized_shape", 1, (0,)))
    for dim in x[len(x) - count :]:
        own.sum(dim, call)


def pool(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Keeps batch and channels; spatial dimensions must not be divided."""
    x = operands[0]
    for result in results:
        count = int(call.op[call.op.index("_pool") + 5])
        own.align(x[:-count], result[:-count])
        own.need([*x[-count:], *result[-count:]], call)


def repeat(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Keeps dimensions whose elements are all repeated equally often."""
    x, (y,) = operands[0], results
    if len(x) == len(y) and isinstance(argument(call, "repeats", 1), int):
        for a, b in zip(x, y, strict=True):
            own.join(a, b)
    else:
        own.need([*x, *y], call)


def part(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Takes part of one dimension."""
    x, (y,) = operands[0], results
    at = argument(call, "dim", 1, 0) % len(x)
    rest = [d for i, d in enumerate(x) if i != at]
    kept = [d for i, d in enumerate(y) if i != at] if len(y) == len(x) else y
    for a, b in zip(rest, kept, strict=True):
        own.join(a, b)
    is_slice = "slice" in call.op and argument(call, "step", 4, 1) == 1
    start = (argument(call, "start", 2) or 0) if is_slice else None
    if is_slice and own.size(y[at]) == own.size(x[at]):
        own.join(x[at], y[at])
    elif isinstance(start, int) and isinstance(size := own.size(x[at]), int):
        own.cut(x[at], y[at], max(0, start + size if start < 0 else start), call)
    else:
        own.need([x[at], *([y[at]] if len(y) == len(x) else ())], call)


def index(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Looks elements of one dimension up, and keeps the others."""
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
    (at,) = given  # the dimensions around it do not change
    own.need([x[at]], call)
    behind = len(x) - at - 1
    for a, b in zip([*x[:at], *x[at + 1 :]], [*y[:at], *y[len(y) - behind :]], strict=True):
        own.join(a, b)


def split(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Cuts one dimension into parts."""
    x = operands[0]
    at = argument(call, "dim", 2, 0) % len(x)
    start = 0
    for part in results:  # packed arrays, such as the gate and up of an MLP
        for i, (old, new) in enumerate(zip(x, part, strict=True)):
            if i != at:
                own.join(old, new)
        size = own.size(part[at])
        if isinstance(start, int) and isinstance(size, int):
            own.cut(x[at], part[at], start, call)
            start += size
        else:
            own.need([x[at], part[at]], call)


def with_gradient(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Returns its first operands."""
    for y, result in zip(operands[0], results, strict=True):
        own.align(y, result)


def group(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Multiplies the rows of each group by the matrix of its expert."""
    x, w = operands[:2]
    (y,) = results
    own.expert(w[0])
    own.contract(x[-1], w[-2], call)
    own.join(w[-1], y[-1])
    own.join(x[0], y[0])
    own.need([x[0]], call)


def _swap(call: Call, rank: int) -> list[int]:
    order = [*range(rank)]
    a, b = call.args[1:3]
    order[a], order[b] = order[b], order[a]
    return order


permute = permutes(lambda call, _: argument(call, "dims", 1))
transpose = permutes(_swap)
t = permutes(lambda _, rank: range(rank)[::-1])
