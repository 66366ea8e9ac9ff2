"""Attention: the softmax of scaled products, times values."""

from __future__ import annotations

import math
from typing import Any

from fmapper.programs import Call, Ref, Scalar
from fmapper_adapters.torch.fuse.graph_index import GraphIndex
from fmapper_adapters.torch.fuse.rewriter import Rewriter

# A logit of at most this number has weight zero.
_LARGE = 1e4


def find(rewriter: Rewriter, call: Call) -> Any | None:
    """Finds `dot(softmax(scale * dot(q, k) [+ bias | where mask]), v)`, dimensions in any order."""
    if call.op != "lax::dot_general" or call.result[0][0] not in ("float32", "float64"):
        return None
    index = rewriter.index
    for i in (0, 1):
        weights, at = index.origin(call.args[i])
        softmax = index.call(weights, "torch::softmax")
        if softmax is not None:
            fused = _attention(rewriter, call, softmax, at, i)
            if fused is not None:
                return fused
    return None


def _attention(
    rewriter: Rewriter, call: Call, softmax: Call, at: dict[int, int], side: int
) -> Any | None:
    index = rewriter.index
    dtype, shape = call.result[0]
    logits = _logits(index, softmax.args[0])
    if logits is None:
        return None
    product, seen, scale, mask, bias, fill = logits
    q, k = product.args
    q, scale = _without_scale(index, q, scale)
    k, scale = _without_scale(index, k, scale)
    labels = _labels(index, product, q, k)
    if labels is None:
        return None
    of_q, of_k, of_logits, batch, rows, columns, depth = labels
    # the positions of the logits' labels in the softmax, and in the multiplied weights
    in_softmax = {seen[i]: label for i, label in of_logits.items() if i in seen}
    in_weights = {at[i]: label for i, label in in_softmax.items() if i in at}
    if in_softmax.get(softmax.kwargs["axis"]) != columns:
        return None
    v = call.args[1 - side]
    pairs = call.kwargs["dimension_numbers"]
    of_v: dict[int, Any] = {}
    for dim, other in zip(
        (*pairs[0][side], *pairs[1][side]), (*pairs[0][1 - side], *pairs[1][1 - side]), strict=True
    ):
        if dim in in_weights:
            of_v[other] = in_weights[dim]
    contracted = [in_weights[i] for i in pairs[0][side] if i in in_weights]
    batched = [in_weights[i] for i in pairs[1][side] if i in in_weights]
    if contracted != [columns] or set(batched) != set(batch):
        return None
    free = [i for i, n in enumerate(index.shape(v)) if n != 1 and i not in of_v]
    if len(free) != 1 or any(index.dtype(x) != dtype for x in (q, k, v)):
        return None
    of_v[free[0]] = "value"
    order = [*batch, rows, columns]
    arranged = [
        _arrange(rewriter, q, of_q, [*batch, rows, depth]),
        _arrange(rewriter, k, of_k, [*batch, columns, depth]),
        _arrange(rewriter, v, of_v, [*batch, columns, "value"]),
    ]
    added: list[Any] = [None, None]
    sizes = {label: index.shape(q)[i] for i, label in of_q.items()}
    sizes |= {label: index.shape(k)[i] for i, label in of_k.items()}
    sizes |= {"value": index.shape(v)[free[0]]}
    for place, value in enumerate((mask, bias)):
        if value is not None:
            added[place] = _spread(rewriter, value, in_softmax, order)
            if added[place] is None:
                return None
    target = [*batch, rows, "value"]
    made = rewriter.call(
        "torch::attention", *arranged, *added, scale=scale, fill=fill, dtype=dtype,
        shape=tuple(sizes[label] for label in target),
    )  # fmt: skip
    result = _result_labels(index, call, side, in_weights, of_v)
    return _place(rewriter, made, target, result, tuple(shape), dtype)


def _without_scale(index: GraphIndex, value: Any, scale: float) -> tuple[Any, float]:
    """Removes a numeric factor from queries or keys, and multiplies the scale with it."""
    call = index.call(value, "mul", "div")
    number = None if call is None else index.number(call.args[1])
    if call is None or not number or index.shape(call.args[0]) != index.shape(value):
        return value, scale
    return call.args[0], scale * number if call.op == "lax::mul" else scale / number


def _logits(index: GraphIndex, value: Any) -> Any | None:
    """Finds the product behind logits, its layout there, and the operations on it."""
    scale, mask, bias, fill = 1.0, None, None, 0.0
    source, at = value, {i: i for i, n in enumerate(index.shape(value)) if n != 1}
    while True:
        source, step = index.origin(source)
        at = {i: at[j] for i, j in step.items() if j in at}
        call = index.call(source)
        if call is None:
            return None
        if call.op == "lax::dot_general":
            return call, at, scale, mask, bias, fill
        if call.op in ("lax::mul", "lax::div"):
            number = index.number(call.args[1])
            inner = call.args[0]
            if number is None and call.op == "lax::mul":
                number, inner = index.number(call.args[0]), call.args[1]
            if number is None or number == 0:
                return None
            scale = scale * number if call.op == "lax::mul" else scale / number
            source = inner
        elif call.op == "lax::select_n" and mask is None and bias is None and scale == 1.0:
            which, no, yes = call.args
            number = index.number(no)
            if number is None or not -math.inf < number <= -_LARGE or value != source:
                return None
            mask, source, fill = which, yes, number
        elif call.op == "lax::add" and mask is None and bias is None and scale == 1.0:
            sides = [_reaches_product(index, arg) for arg in call.args]
            if sides[0] == sides[1] or value != source:
                return None
            source, bias = call.args if sides[0] else call.args[::-1]
            if not _is_moderate(index, bias):
                return None
        else:
            return None
        if index.shape(source) != index.shape(Ref(call.name)):
            return None


def _reaches_product(index: GraphIndex, value: Any) -> bool:
    for _ in range(4):
        call = index.call(index.origin(value)[0], "dot_general", "mul", "div")
        if call is None:
            return False
        if call.op == "lax::dot_general":
            return True
        value = call.args[1] if index.number(call.args[0]) is not None else call.args[0]
    return False


def _is_moderate(index: GraphIndex, value: Any) -> bool:
    """Returns whether a bias consists of trained arrays and small numbers, so it masks no row.

    torch's fast attention has wrong gradients for rows whose logits are all near -1e9.
    """
    todo, seen = [value], set()
    while todo:
        term = todo.pop()
        if isinstance(term, Scalar):
            if abs(term.value) >= _LARGE:
                return False
        elif isinstance(term, Ref) and term.name not in seen:
            seen.add(term.name)
            call = index.call(term)
            if call is None and index.roles.get(term.name) != "trained":
                if not index.dtype(term).startswith(("int", "uint")):
                    return False
            elif call is not None:
                todo += call.args
        if len(seen) > 64:
            return False
    return True


def _labels(index: GraphIndex, product: Call, q: Any, k: Any) -> Any | None:
    """Labels the dimensions of q, k and their product that are not of size 1."""
    (left, right), (batch_left, batch_right) = product.kwargs["dimension_numbers"]
    shapes = index.shape(q), index.shape(k)
    of_q: dict[int, Any] = {}
    of_k: dict[int, Any] = {}
    of_logits: dict[int, Any] = {}
    batch = []
    for n, (i, j) in enumerate(zip(batch_left, batch_right, strict=True)):
        if shapes[0][i] != 1:
            batch.append(f"batch{n}")
            of_q[i] = of_k[j] = of_logits[n] = f"batch{n}"
    if len(left) != 1:
        return None
    of_q[left[0]] = of_k[right[0]] = "depth"
    position = len(batch_left)
    for labels, shape, taken, name in (
        (of_q, shapes[0], (*left, *batch_left), "row"),
        (of_k, shapes[1], (*right, *batch_right), "column"),
    ):
        free = [i for i in range(len(shape)) if i not in taken]
        large = [i for i in free if shape[i] != 1]
        if len(large) != 1:
            return None
        labels[large[0]] = name
        of_logits[position + free.index(large[0])] = name
        position += len(free)
    return of_q, of_k, of_logits, batch, "row", "column", "depth"


def _arrange(rewriter: Rewriter, value: Any, labels: dict[int, Any], order: list[Any]) -> Any:
    """Permutes a value, without unlabelled dimensions of size 1."""
    index = rewriter.index
    dtype, shape = index.dtype(value), index.shape(value)
    kept = [i for i in range(len(shape)) if i in labels]
    if len(kept) != len(shape):
        small = tuple(shape[i] for i in kept)
        value = rewriter.call("lax::reshape", value, new_sizes=small, shape=small, dtype=dtype)
    names = [labels[i] for i in kept]
    permutation = tuple(names.index(label) for label in order)
    sizes = tuple(shape[kept[i]] for i in permutation)
    if permutation == tuple(range(len(permutation))):
        return value
    return rewriter.call("lax::transpose", value, permutation=permutation, shape=sizes, dtype=dtype)


def _spread(rewriter: Rewriter, value: Any, labels: dict[int, Any], order: list[Any]) -> Any | None:
    """Permutes a mask or bias to broadcast against the logits."""
    index = rewriter.index
    source, at = index.origin(value)
    shape = index.shape(source)
    large = [i for i, n in enumerate(shape) if n != 1]
    if any(i not in at or at[i] not in labels for i in large):
        return None
    names = [labels[at[i]] for i in large]
    dtype = index.dtype(source)
    small = tuple(shape[i] for i in large)
    if len(large) != len(shape):
        source = rewriter.call("lax::reshape", source, new_sizes=small, shape=small, dtype=dtype)
    wanted = [label for label in order if label in names]
    permutation = tuple(names.index(label) for label in wanted)
    if permutation != tuple(range(len(permutation))):
        small = tuple(small[i] for i in permutation)
        source = rewriter.call(
            "lax::transpose", source, permutation=permutation, shape=small, dtype=dtype
        )
    sizes = dict(zip(wanted, small, strict=True))
    full = tuple(sizes.get(label, 1) for label in order)
    return rewriter.call("lax::reshape", source, new_sizes=full, shape=full, dtype=dtype)


def _result_labels(
    index: GraphIndex, call: Call, side: int, in_weights: dict[int, Any], of_v: dict[int, Any]
) -> dict[int, Any]:
    """Returns the labels of the result's dimensions that are not of size 1."""
    pairs = call.kwargs["dimension_numbers"]
    labels = (in_weights, of_v) if side == 0 else (of_v, in_weights)
    ordered: list[Any] = [labels[0].get(i) for i in pairs[1][0]]
    for n in (0, 1):
        taken = (*pairs[0][n], *pairs[1][n])
        rank = len(index.shape(call.args[n]))
        ordered += [labels[n].get(i) for i in range(rank) if i not in taken]
    return {i: label for i, label in enumerate(ordered) if label is not None}


def _place(
    rewriter: Rewriter, value: Any, order: list[Any], labels: dict[int, Any],
    shape: tuple[Any, ...], dtype: str,
) -> Any | None:  # fmt: skip
    """Permutes and reshapes a value to the labelled dimensions of the original call."""
    index = rewriter.index
    wanted = [labels[i] for i in sorted(labels) if labels[i] in order]
    sizes = dict(zip(order, index.shape(value), strict=True))
    if set(wanted) != {label for label in order if sizes[label] != 1}:
        wanted = [*wanted, *[label for label in order if label not in wanted]]
    permutation = tuple(order.index(label) for label in wanted)
    small = tuple(sizes[label] for label in wanted)
    if permutation != tuple(range(len(permutation))):
        value = rewriter.call(
            "lax::transpose", value, permutation=permutation, shape=small, dtype=dtype
        )
    if small != shape:
        value = rewriter.call("lax::reshape", value, new_sizes=shape, shape=shape, dtype=dtype)
    return value
