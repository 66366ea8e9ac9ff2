"""Rules for the dimensions of single ATen operations: the `dims` of their lowerings."""

from __future__ import annotations

from typing import Any

from fmapper.meshes import Dimensions, Dims, argument, keep_but, permutes
from fmapper.programs import Call


def linear(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Sums over features; the outputs are the rows of the weight."""
    x, w, *bias = operands
    (y,) = results
    dimensions.align(x[:-1], y[:-1])
    dimensions.contract(x[-1], w[-1], call)
    dimensions.join(w[0], y[-1])
    if bias and bias[0]:
        dimensions.join(bias[0][0], y[-1])


def matmul(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Sums over the columns of one matrix and the rows of the other."""
    a, b = operands
    (y,) = results
    dimensions.contract(a[-1], b[-2] if len(b) > 1 else b[-1], call)
    rows = [*a[:-1]]
    if len(b) > 1:
        dimensions.join(b[-1], y[-1])
        dimensions.align(b[:-2], y[:-2])
        dimensions.align(rows, y[:-1])
    else:
        dimensions.align(rows, y)


def addmm(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Adds a bias to a product of matrices."""
    bias, *factors = operands
    matmul(dimensions, call, factors[:2], results)
    if bias:
        dimensions.align(bias, results[0])


def embedding(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Looks rows up."""
    weight, indices = operands[:2]
    (y,) = results
    dimensions.align(indices, y[:-1])
    dimensions.join(weight[1], y[-1])
    dimensions.look_up(weight[0], call)


def attention(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Keeps batches, heads and queries; sums over keys."""
    q, k, v, *mask = operands
    (y,) = results
    dimensions.align(q[:-1], y[:-1])
    dimensions.join(v[-1], y[-1])
    dimensions.align(k[:-2], v[:-2])
    for at, dim in enumerate(k[:-2]):
        if len(k) == len(q):
            dimensions.join(dim, q[at])  # with fewer heads, the first of those that share a head
    dimensions.contract(q[-1], k[-1], call)
    dimensions.contract(k[-2], v[-2], call)
    dimensions.need([k[-2]], call)
    if mask and mask[0]:
        dimensions.align(mask[0], [*q[:-1], k[-2]])


def convolution(
    dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]
) -> None:
    """Sums over input channels; spatial dimensions must not be divided."""
    x, w, *bias = operands
    (y,) = results
    groups = argument(call, "groups", 8 if call.op.startswith("aten::convolution") else 6, 1)
    if len(x) == len(y):
        dimensions.join(x[0], y[0])
    dimensions.join(w[0], y[1 - len(w)])
    if groups == 1:
        dimensions.contract(x[1 - len(w)], w[1], call)
    elif groups == dimensions.size(x[1 - len(w)]) == dimensions.size(w[0]):
        dimensions.join(x[1 - len(w)], w[0])
    else:
        dimensions.need([x[1 - len(w)], w[0], w[1]], call)
    dimensions.need([*x[2 - len(w) :], *y[2 - len(w) :], *w[2:]], call)
    if bias and bias[0]:
        dimensions.join(bias[0][0], w[0])


def batch_norm(
    dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]
) -> None:
    """Keeps all dimensions; the other operands have the dimension of the channels."""
    x, *others = operands
    dimensions.align(x, results[0])
    for other in others:
        if other and len(other) == 1:
            dimensions.join(other[0], x[1])


def batch_statistics(
    dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]
) -> None:
    """Sums over all dimensions but that of the channels, and keeps them."""
    batch_norm(dimensions, call, operands, results)
    for dim in (operands[0][0], *operands[0][2:]):
        dimensions.sum(dim, call)


def group_norm(
    dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]
) -> None:
    """Keeps the batch; all other dimensions must not be divided."""
    x, *others = operands
    for result in results:
        dimensions.join(x[0], result[0])
        dimensions.need(result[1:], call)
    for dims in (x[1:], *filter(None, others)):
        dimensions.need(dims, call)


def layer_norm(
    dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]
) -> None:
    """Sums over the last dimensions, and keeps them."""
    x, *others = operands
    for result in results:  # the mean and the factor, too
        dimensions.align(x, result)
    for other in others:
        if other:
            dimensions.align(other, x)
    count = len(argument(call, "normalized_shape", 1, (0,)))
    for dim in x[len(x) - count :]:
        dimensions.sum(dim, call)


def pool(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Keeps batch and channels; spatial dimensions must not be divided."""
    x = operands[0]
    for result in results:
        count = int(call.op[call.op.index("_pool") + 5])
        dimensions.align(x[:-count], result[:-count])
        dimensions.need([*x[-count:], *result[-count:]], call)


def repeat(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Keeps dimensions whose elements are all repeated equally often."""
    x, (y,) = operands[0], results
    if len(x) == len(y) and isinstance(argument(call, "repeats", 1), int):
        for a, b in zip(x, y, strict=True):
            dimensions.join(a, b)
    else:
        dimensions.need([*x, *y], call)


def part(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Takes part of one dimension."""
    x, (y,) = operands[0], results
    at = argument(call, "dim", 1, 0) % len(x)
    rest = [d for i, d in enumerate(x) if i != at]
    kept = [d for i, d in enumerate(y) if i != at] if len(y) == len(x) else y
    for a, b in zip(rest, kept, strict=True):
        dimensions.join(a, b)
    is_slice = "slice" in call.op and argument(call, "step", 4, 1) == 1
    start = (argument(call, "start", 2) or 0) if is_slice else None
    if is_slice and dimensions.size(y[at]) == dimensions.size(x[at]):
        dimensions.join(x[at], y[at])
    elif isinstance(start, int) and isinstance(size := dimensions.size(x[at]), int):
        dimensions.cut(x[at], y[at], max(0, start + size if start < 0 else start), call)
    else:
        dimensions.need([x[at], *([y[at]] if len(y) == len(x) else ())], call)


def windows(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Takes windows of one dimension, whose elements are a new last dimension."""
    x, (y,) = operands[0], results
    keep_but(dimensions, call, [x], [y[:-1]], {argument(call, "dimension", 1) % len(x)})
    dimensions.need(y[-1:], call)


def bucketize(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Looks each element up among the boundaries."""
    dimensions.align(operands[0] or [], results[0])
    dimensions.need(operands[1], call)


def gather(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Looks elements up along one dimension, which must not be divided."""
    x, _, indices = operands[:3]
    (y,) = results
    at = argument(call, "dim", 1) % len(x)
    for old, new in zip(x[:at] + x[at + 1 :], y[:at] + y[at + 1 :], strict=True):
        if dimensions.size(old) == dimensions.size(new):
            dimensions.join(old, new)
        else:
            dimensions.need([old, new], call)
    is_select = call.op.startswith("aten::index_select")
    for old, new in zip(indices, y[at : at + 1] if is_select else y, strict=True):
        dimensions.join(old, new)
    dimensions.need([x[at]], call)


def index(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Looks elements of one dimension up, and keeps the others."""
    x, indices = operands[:2]
    (y,) = results
    if indices and len(indices) == 1 and indices[0]:
        dimensions.need([x[0]], call)
        for a, b in zip(x[1:], y[len(y) - len(x) + 1 :], strict=True):
            dimensions.join(a, b)
        return
    given = [at for at, index in enumerate(call.args[1]) if index is not None]
    if len(given) != 1:
        dimensions.need([*x, *y], call)
        return
    (at,) = given  # the dimensions around it do not change
    dimensions.need([x[at]], call)
    behind = len(x) - at - 1
    for a, b in zip([*x[:at], *x[at + 1 :]], [*y[:at], *y[len(y) - behind :]], strict=True):
        dimensions.join(a, b)


def split(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Cuts one dimension into parts."""
    x = operands[0]
    at = argument(call, "dim", 2, 0) % len(x)
    start = 0
    for part in results:  # packed arrays, such as the gate and up of an MLP
        for i, (old, new) in enumerate(zip(x, part, strict=True)):
            if i != at:
                dimensions.join(old, new)
        size = dimensions.size(part[at])
        if isinstance(start, int) and isinstance(size, int):
            dimensions.cut(x[at], part[at], start, call)
            start += size
        else:
            dimensions.need([x[at], part[at]], call)


def with_gradient(
    dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]
) -> None:
    """Returns its first operands."""
    for y, result in zip(operands[0], results, strict=True):
        dimensions.align(y, result)


def group(dimensions: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    """Multiplies the rows of each group by the matrix of its expert."""
    x, w = operands[:2]
    (y,) = results
    dimensions.expert(w[0])
    dimensions.contract(x[-1], w[-2], call)
    dimensions.join(w[-1], y[-1])
    dimensions.join(x[0], y[0])
    dimensions.need([x[0]], call)


def _swap(call: Call, rank: int) -> list[int]:
    order = [*range(rank)]
    a, b = call.args[1:3]
    order[a], order[b] = order[b], order[a]
    return order


permute = permutes(lambda call, _: argument(call, "dims", 1))
transpose = permutes(_swap)
t = permutes(lambda _, rank: range(rank)[::-1])
