"""Layer norms and their like, and means."""

from __future__ import annotations

from typing import Any

from fmapper.programs import Call, Ref
from fmapper_adapters.torch.fuse.graph_index import GraphIndex
from fmapper_adapters.torch.fuse.rewriter import Rewriter


def find(rewriter: Rewriter, call: Call) -> Any | None:
    """Finds `(x - mean) / sqrt(variance + eps) * scale + bias`, as libraries write it."""
    if call.op not in ("lax::add", "lax::mul"):
        return None
    dtype, shape = call.result[0]
    if dtype not in ("float32", "float64", "bfloat16"):
        return None  # squares of float16 overflow in JAX
    norm = _extend(rewriter, call, dtype, tuple(shape))
    if norm is None and call.op == "lax::mul":
        norm = _norm(rewriter, call, dtype, tuple(shape))
    return norm


def _extend(rewriter: Rewriter, call: Call, dtype: str, shape: tuple[Any, ...]) -> Any | None:
    """Extends a norm by a scale or a bias."""
    index = rewriter.index
    for value, other in (call.args, call.args[::-1]):
        norm = index.call(value, "torch::layer_norm", "torch::rms_norm", "torch::batch_norm")
        if norm is None or index.shape(value) != shape:
            continue
        *first, scale, bias = norm.args
        if bias is not None or (call.op == "lax::mul" and scale is not None):
            continue
        if call.op == "lax::add" and norm.op == "torch::rms_norm":
            continue  # torch's has no bias
        count = norm.kwargs.get("count", 0)
        axes = range(len(shape) - count, len(shape)) if count else (norm.kwargs["channel"],)
        weight = _weight(index, other, tuple(axes), shape, dtype)
        if weight is None or (not count and index.call(weight) is not None):
            continue
        given = (weight, None) if call.op == "lax::mul" else (scale, weight)
        return rewriter.call(norm.op, *first, *given, shape=shape, dtype=dtype, **norm.kwargs)
    return None


def _weight(
    index: GraphIndex, value: Any, axes: tuple[int, ...], shape: tuple[Any, ...], dtype: str
) -> Any | None:
    """Returns a scale or bias in torch's shape."""
    weight = index.align(value, axes)
    if weight is None or index.shape(weight) != tuple(shape[i] for i in axes):
        return None
    return weight if index.dtype(weight) == dtype else None


def _norm(rewriter: Rewriter, product: Call, dtype: str, shape: tuple[Any, ...]) -> Any | None:
    index = rewriter.index
    factors = index.factors(Ref(product.name), shape)
    if not 2 <= len(factors) <= 3:
        return None
    for root in factors:
        inverse = index.call(index.origin(root)[0], "rsqrt")
        rest = [f for f in factors if f is not root]
        if inverse is None:
            continue
        shifted = index.call(inverse.args[0], "add")
        if shifted is None:
            continue
        for variance, eps in (shifted.args, shifted.args[::-1]):
            number = index.number(eps)
            if number is None:
                continue
            for x in rest:
                if index.shape(x) != shape:
                    continue
                scale = [f for f in rest if f is not x]
                fused = _own_statistics(
                    rewriter, x, root, variance, number, scale, dtype, shape
                ) or _given_statistics(rewriter, x, root, variance, number, scale, dtype, shape)
                if fused is not None:
                    return fused
    return None


def _own_statistics(
    rewriter: Rewriter, x: Any, root: Any, variance: Any, eps: float, scale: list[Any],
    dtype: str, shape: tuple[Any, ...],
) -> Any | None:  # fmt: skip
    """Recognises layer norm and RMS norm, over the last dimensions of x."""
    index = rewriter.index
    centred = index.call(x, "sub")
    if centred is not None:
        mean = index.mean_of(centred.args[1])
        if mean is not None and mean[0] == centred.args[0]:
            full, axes = mean
            if index.variance_is(variance, full, axes) and _are_trailing(axes, shape):
                return _layer_norm(rewriter, full, axes, root, eps, scale, dtype, shape)
    squares = index.mean_of(variance)
    if (
        squares is not None
        and index.square_of(squares[0]) == x
        and _are_trailing(squares[1], shape)
    ):
        return _layer_norm(rewriter, x, squares[1], root, eps, scale, dtype, shape, centred=False)
    return None


def _are_trailing(axes: tuple[int, ...], shape: tuple[Any, ...]) -> bool:
    fixed = all(isinstance(shape[i], int) for i in axes)
    return fixed and axes == tuple(range(len(shape) - len(axes), len(shape)))


def _layer_norm(
    rewriter: Rewriter, x: Any, axes: tuple[int, ...], root: Any, eps: float, scale: list[Any],
    dtype: str, shape: tuple[Any, ...], *, centred: bool = True,
) -> Any | None:  # fmt: skip
    index = rewriter.index
    if index.unreduce(root, shape, axes) is None:
        return None
    weight = _weight(index, scale[0], axes, shape, dtype) if scale else None
    if scale and weight is None:
        return None
    op = "torch::layer_norm" if centred else "torch::rms_norm"
    return rewriter.call(op, x, weight, None, eps=eps, count=len(axes), shape=shape, dtype=dtype)


def _given_statistics(
    rewriter: Rewriter, x: Any, root: Any, variance: Any, eps: float, scale: list[Any],
    dtype: str, shape: tuple[Any, ...],
) -> Any | None:  # fmt: skip
    """Recognises batch norm in evaluation: mean and variance are arrays of the model."""
    index = rewriter.index
    centred = index.call(x, "sub")
    if centred is None or index.shape(centred.args[0]) != shape:
        return None
    for statistic in (variance, centred.args[1]):
        source = index.origin(statistic)[0]
        if index.roles.get(getattr(source, "name", "")) != "fixed" or len(shape) < 2:
            return None  # torch's batch norm has no gradient for them
    for channel in range(len(shape)):
        parts = []
        for value in (centred.args[1], variance, *(scale or [None])):
            part = None if value is None else _weight(index, value, (channel,), shape, dtype)
            if value is not None and (part is None or index.call(part) is not None):
                break
            parts.append(part)
        else:
            if index.origin(root)[1] == {} or set(index.origin(root)[1].values()) <= {channel}:
                return rewriter.call(
                    "torch::batch_norm", centred.args[0], *parts, None, eps=eps, channel=channel,
                    shape=shape, dtype=dtype,
                )  # fmt: skip
    return None


def find_mean(rewriter: Rewriter, call: Call) -> Any | None:
    """Recognises a sum divided by the number of its terms."""
    if call.op != "lax::div" or call.result[0][0] not in ("float32", "float64"):
        return None  # sums of float16 overflow in JAX
    index = rewriter.index
    mean = index.mean_of(Ref(call.name))
    if mean is None:
        return None
    x, axes = mean
    dtype, shape = call.result[0]
    full = index.shape(x)
    kept = tuple(1 if i in axes else n for i, n in enumerate(full))
    if tuple(shape) == kept and kept != full:
        keep = True
    elif tuple(shape) == tuple(n for i, n in enumerate(full) if i not in axes):
        keep = False
    else:
        return None
    return rewriter.call("torch::mean", x, axes=axes, keep=keep, shape=shape, dtype=dtype)
