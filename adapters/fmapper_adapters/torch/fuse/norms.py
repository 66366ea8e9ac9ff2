"""Layer norms and their like, and means."""

from __future__ import annotations

from typing import Any

from fmapper.programs import Call, Ref


def find(rewriter: Any, call: Call) -> Any | None:
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


def _extend(rewriter: Any, call: Call, dtype: str, shape: tuple[Any, ...]) -> Any | None:
    """Extends a norm by a scale or a bias."""
    look = rewriter.look
    for value, other in (call.args, call.args[::-1]):
        norm = look.call(value, "torch::layer_norm", "torch::rms_norm", "torch::batch_norm")
        if norm is None or look.shape(value) != shape:
            continue
        *first, scale, bias = norm.args
        if bias is not None or (call.op == "lax::mul" and scale is not None):
            continue
        if call.op == "lax::add" and norm.op == "torch::rms_norm":
            continue  # torch's has no bias
        count = norm.kwargs.get("count", 0)
        axes = range(len(shape) - count, len(shape)) if count else (norm.kwargs["channel"],)
        weight = _weight(look, other, tuple(axes), shape, dtype)
        if weight is None or (not count and look.call(weight) is not None):
            continue
        given = (weight, None) if call.op == "lax::mul" else (scale, weight)
        return rewriter.call(norm.op, *first, *given, shape=shape, dtype=dtype, **norm.kwargs)
    return None


def _weight(
    look: Any, value: Any, axes: tuple[int, ...], shape: tuple[Any, ...], dtype: str
) -> Any | None:
    """Returns a scale or bias in torch's shape."""
    weight = look.align(value, axes)
    if weight is None or look.shape(weight) != tuple(shape[i] for i in axes):
        return None
    return weight if look.dtype(weight) == dtype else None


def _norm(rewriter: Any, product: Call, dtype: str, shape: tuple[Any, ...]) -> Any | None:
    look = rewriter.look
    factors = look.factors(Ref(product.name), shape)
    if not 2 <= len(factors) <= 3:
        return None
    for root in factors:
        inverse = look.call(look.origin(root)[0], "rsqrt")
        rest = [f for f in factors if f is not root]
        if inverse is None:
            continue
        shifted = look.call(inverse.args[0], "add")
        if shifted is None:
            continue
        for variance, eps in (shifted.args, shifted.args[::-1]):
            number = look.number(eps)
            if number is None:
                continue
            for x in rest:
                if look.shape(x) != shape:
                    continue
                scale = [f for f in rest if f is not x]
                fused = _own_statistics(
                    rewriter, x, root, variance, number, scale, dtype, shape
                ) or _given_statistics(rewriter, x, root, variance, number, scale, dtype, shape)
                if fused is not None:
                    return fused
    return None


def _own_statistics(
    rewriter: Any, x: Any, root: Any, variance: Any, eps: float, scale: list[Any],
    dtype: str, shape: tuple[Any, ...],
) -> Any | None:  # fmt: skip
    """Recognises layer norm and RMS norm, over the last dimensions of x."""
    look = rewriter.look
    centred = look.call(x, "sub")
    if centred is not None:
        mean = look.mean_of(centred.args[1])
        if mean is not None and mean[0] == centred.args[0]:
            full, axes = mean
            if look.variance_is(variance, full, axes) and _are_trailing(axes, shape):
                return _layer_norm(rewriter, full, axes, root, eps, scale, dtype, shape)
    squares = look.mean_of(variance)
    if squares is not None and look.square_of(squares[0]) == x and _are_trailing(squares[1], shape):
        return _layer_norm(rewriter, x, squares[1], root, eps, scale, dtype, shape, centred=False)
    return None


def _are_trailing(axes: tuple[int, ...], shape: tuple[Any, ...]) -> bool:
    fixed = all(isinstance(shape[i], int) for i in axes)
    return fixed and axes == tuple(range(len(shape) - len(axes), len(shape)))


def _layer_norm(
    rewriter: Any, x: Any, axes: tuple[int, ...], root: Any, eps: float, scale: list[Any],
    dtype: str, shape: tuple[Any, ...], *, centred: bool = True,
) -> Any | None:  # fmt: skip
    look = rewriter.look
    if look.unreduce(root, shape, axes) is None:
        return None
    weight = _weight(look, scale[0], axes, shape, dtype) if scale else None
    if scale and weight is None:
        return None
    op = "torch::layer_norm" if centred else "torch::rms_norm"
    return rewriter.call(op, x, weight, None, eps=eps, count=len(axes), shape=shape, dtype=dtype)


def _given_statistics(
    rewriter: Any, x: Any, root: Any, variance: Any, eps: float, scale: list[Any],
    dtype: str, shape: tuple[Any, ...],
) -> Any | None:  # fmt: skip
    """Recognises batch norm in evaluation: mean and variance are arrays of the model."""
    look = rewriter.look
    centred = look.call(x, "sub")
    if centred is None or look.shape(centred.args[0]) != shape:
        return None
    for statistic in (variance, centred.args[1]):
        source = look.origin(statistic)[0]
        if look.roles.get(getattr(source, "name", "")) != "fixed" or len(shape) < 2:
            return None  # torch's batch norm has no gradient for them
    for channel in range(len(shape)):
        parts = []
        for value in (centred.args[1], variance, *(scale or [None])):
            part = None if value is None else _weight(look, value, (channel,), shape, dtype)
            if value is not None and (part is None or look.call(part) is not None):
                break
            parts.append(part)
        else:
            if look.origin(root)[1] == {} or set(look.origin(root)[1].values()) <= {channel}:
                return rewriter.call(
                    "torch::batch_norm", centred.args[0], *parts, None, eps=eps, channel=channel,
                    shape=shape, dtype=dtype,
                )  # fmt: skip
    return None


def find_mean(rewriter: Any, call: Call) -> Any | None:
    """Recognises a sum divided by the number of its terms."""
    if call.op != "lax::div" or call.result[0][0] not in ("float32", "float64"):
        return None  # sums of float16 overflow in JAX
    look = rewriter.look
    mean = look.mean_of(Ref(call.name))
    if mean is None:
        return None
    x, axes = mean
    dtype, shape = call.result[0]
    full = look.shape(x)
    kept = tuple(1 if i in axes else n for i, n in enumerate(full))
    if tuple(shape) == kept and kept != full:
        keep = True
    elif tuple(shape) == tuple(n for i, n in enumerate(full) if i not in axes):
        keep = False
    else:
        return None
    return rewriter.call("torch::mean", x, axes=axes, keep=keep, shape=shape, dtype=dtype)
