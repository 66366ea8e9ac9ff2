"""Dense layers: a product with a matrix of weights, and a bias."""

from __future__ import annotations

import math
from typing import Any

from fmapper.programs import Call
from fmapper_adapters.torch.fuse.graph_index import GraphIndex
from fmapper_adapters.torch.fuse.rewriter import Rewriter


def turn(rewriter: Rewriter, call: Call) -> Any | None:
    """Turns `dot(w, x)`, whose result is transposed, into `dot(x, w)`."""
    index = rewriter.index
    product = index.call(call.args[0], "dot_general") if call.op == "lax::transpose" else None
    if product is None:
        return None
    (left, right), (batch_left, batch_right) = product.kwargs["dimension_numbers"]
    a, b = (len(index.shape(arg)) for arg in product.args)
    shared = len(batch_left)
    of_a = a - len(left) - shared
    of_b = b - len(right) - shared
    swapped = (
        *range(shared),
        *range(shared + of_a, shared + of_a + of_b),
        *range(shared, shared + of_a),
    )
    if tuple(call.kwargs["permutation"]) != swapped:
        return None
    numbers = (right, left), (batch_right, batch_left)
    kwargs = {**product.kwargs, "dimension_numbers": numbers}
    dtype, shape = call.result[0]
    return rewriter.call(product.op, *product.args[::-1], shape=shape, dtype=dtype, **kwargs)


def absorb(rewriter: Rewriter, call: Call) -> Any | None:
    """Absorbs the transposition of an operand into a product."""
    if call.op != "lax::dot_general":
        return None
    index = rewriter.index
    summed, shared = (list(pair) for pair in call.kwargs["dimension_numbers"])
    args = list(call.args)
    for i in (0, 1):
        move = index.call(args[i], "transpose")
        if move is None or move.module != call.module:  # keeps the arguments of parts
            continue
        order = move.kwargs["permutation"]
        free = [order[j] for j in range(len(order)) if j not in (*summed[i], *shared[i])]
        if free != sorted(free):
            continue
        summed[i] = tuple(order[j] for j in summed[i])
        shared[i] = tuple(order[j] for j in shared[i])
        args[i] = move.args[0]
    if args == list(call.args):
        return None
    kwargs = {**call.kwargs, "dimension_numbers": (tuple(summed), tuple(shared))}
    dtype, shape = call.result[0]
    return rewriter.call(call.op, *args, shape=shape, dtype=dtype, **kwargs)


def find(rewriter: Rewriter, call: Call) -> Any | None:
    """Finds `x @ w + b` in one dtype; several dimensions may be summed over, or come from w."""
    if call.op != "lax::add" or call.result[0][0] not in ("float32", "float64", "bfloat16"):
        return None  # products of float16 overflow in JAX before the bias is added
    index = rewriter.index
    dtype, shape = call.result[0]
    for i in (0, 1):
        product = index.call(call.args[i], "dot_general")
        if product is None or tuple(product.result[0][1]) != tuple(shape):
            continue
        weights = _weights(index, product)
        if weights is None or any(index.dtype(v) != dtype for v in product.args):
            continue
        transposed, summed, made = weights
        x, w = product.args
        bias = index.align(call.args[1 - i], tuple(range(len(shape) - made, len(shape))))
        if bias is None or index.shape(bias) != tuple(shape[len(shape) - made :]):
            continue
        if index.dtype(bias) != dtype:
            continue
        return rewriter.call(
            "torch::dense", x, w, bias, transposed=transposed, summed=summed,
            made=index.shape(bias), shape=shape, dtype=dtype,
        )  # fmt: skip
    return None


def _weights(index: GraphIndex, product: Call) -> tuple[bool, int, int] | None:
    """Returns the layout of w: transposed or not, and how many dimensions are summed and made."""
    x, w = (index.shape(arg) for arg in product.args)
    (left, right), (batch, _) = product.kwargs["dimension_numbers"]
    summed, made = len(left), len(w) - len(right)
    if batch or not summed or made < 1 or len(x) <= summed:
        return None
    if tuple(left) != tuple(range(len(x) - summed, len(x))):
        return None
    sizes = [w[i] for i in range(len(w))]
    if not all(isinstance(n, int) for n in sizes) or math.prod(sizes) == 0:
        return None
    if tuple(right) == tuple(range(summed)):
        return False, summed, made
    if tuple(right) == tuple(range(made, len(w))):
        return True, summed, made
    return None
