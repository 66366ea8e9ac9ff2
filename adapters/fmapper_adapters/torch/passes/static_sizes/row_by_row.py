"""Operations that compute each row of the result from that row of the operands alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from fmapper.programs import Call, DType, Ref
from fmapper_adapters.torch import _private
from fmapper_adapters.torch.from_fx.size_facts import Sizes
from fmapper_adapters.torch.passes.static_sizes.writer import Writer

_END = 2**62  # ends of slices beyond this mean the end

# Row by row along any dimension.
_ROW_BY_ROW = {"clone", "_to_copy", "to", "detach", "alias", "contiguous", "masked_fill", "dropout"}
_ROW_BY_ROW |= {"where", "lift_fresh_copy", "zeros_like", "ones_like", "full_like", "empty_like"}
_ROW_BY_ROW |= {
    "native_dropout",
    "copy",
    "fill",
    "stop_gradient",
    "_conj",
    "view_as_real",
    "view_as_complex",
}
# Row by row if rows are the first dimension of the first argument.
_BY_BATCH = {"conv1d", "conv2d", "conv3d", "convolution", "max_pool1d", "max_pool2d", "avg_pool1d"}
_BY_BATCH |= {"avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "group_norm", "bmm"}
_BY_BATCH |= {"scaled_dot_product_attention"}
# Operation -> the position of the argument with the dimensions that it combines.
_ALONG = {"softmax": 1, "_softmax": 1, "log_softmax": 1, "_log_softmax": 1, "sum": 1, "mean": 1}
_ALONG |= {"amax": 1, "amin": 1, "any": 1, "all": 1, "argmax": 1, "argmin": 1, "cumsum": 1}
_ALONG |= {"topk": 2, "sort": 1, "max": 1, "min": 1, "var": 1, "std": 1, "logsumexp": 1, "norm": 2}
_ALONG |= {"flip": 1, "glu": 1, "cat": 1, "split": 2, "split_with_sizes": 2, "chunk": 2}
_ALONG |= {"unbind": 1, "select": 1, "cumprod": 1, "narrow": 1, "roll": 2, "linalg_vector_norm": 2}
_ALONG |= {"unfold": 1}
_DEFAULT_DIM = {"cat": 0, "split": 0, "split_with_sizes": 0, "chunk": 0, "unbind": 0}
_DEFAULT_DIM |= {"topk": -1, "sort": -1, "glu": -1}
_SHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten"}
_MOVES = {"permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "movedim"}


def is_row_by_row(writer: Writer, call: Call, name: str) -> bool:
    """Returns whether each row of the result depends only on the same row of the operands."""
    shape = writer.facts.shapes.get(call.name)
    target = writer.padded_dim(shape) if shape is not None else None
    operands = [(n, *writer.rows[n]) for n in writer.padded_refs(call)]
    if name == "getitem":
        return True
    if name in _ROW_BY_ROW or is_pointwise(call.op):
        # counted from the end, as in broadcasting
        return target is not None and all(
            dim - len(writer.shapes[n]) == target[0] - len(shape or ()) and size == target[1]
            for n, dim, size in operands
        )
    first = next(iter(call.refs()), None)
    if name == "cat":
        dim = dims_of(call, name, len(shape or ()))[0]
        names = [ref.name for ref in call.args[0]]
        return target is not None and all(
            n in writer.rows and writer.rows[n] == target and target[0] != dim for n in names
        )
    if name in _BY_BATCH:
        tensors = [ref.name for ref in call.args if isinstance(ref, Ref)]
        if name in ("scaled_dot_product_attention", "bmm"):
            return target == (0, operands[0][2]) and all(
                writer.rows.get(n) == target for n in tensors
            )
        return len(operands) == 1 and operands[0][0] == first and operands[0][1] == 0
    if len(operands) != 1 or operands[0][0] != first:
        return False
    array, dim, _ = operands[0]
    rank = len(writer.shapes[array])
    if name in _MOVES:
        return target is not None and target[1] == operands[0][2]
    if name in _SHAPES:
        return _keeps_prefix(writer, writer.shapes[array], shape or (), dim, target)
    if name in ("linear", "mm", "matmul"):
        return dim != rank - 1 and target is not None
    if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
        return dim < rank - len(call.args[1])
    if name == "bucketize":  # with the same boundaries for all rows
        return True
    if name == "slice":
        return _is_whole_slice(writer, call, rank, operands[0])
    if name in ("cumsum", "cumprod"):  # later elements do not affect earlier ones
        return True
    if name in _ALONG:
        dims = dims_of(call, name, rank)
        return bool(dims) and dim not in dims
    return False


def _is_whole_slice(writer: Writer, call: Call, rank: int, operand: tuple[str, int, Any]) -> bool:
    _, dim, size = operand
    along = (call.args[1] if len(call.args) > 1 else 0) % rank
    if along != dim:
        return True
    start, end = (*call.args[2:], None, None)[:2]
    step = call.args[4] if len(call.args) > 4 else 1
    whole = end is None or (isinstance(end, int) and end >= min(_END, writer.size(size)))
    return start in (None, 0) and whole and step == 1


def _keeps_prefix(writer: Writer, old: Sizes, new: Sizes, dim: int, target: Any) -> bool:
    """Returns whether valid rows also come first in the new shape."""
    if target is None:
        return False
    before, after = writer.sizes(old[:dim]), writer.sizes(new[: target[0]])
    return math.prod(before) == math.prod(after)


def is_pointwise(op: str) -> bool:
    """Returns whether torch tags an operation as pointwise."""
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    function = getattr(packet, overload, None)
    return isinstance(function, _private.OpOverload) and torch.Tag.pointwise in function.tags


def dims_of(call: Call, name: str, rank: int) -> tuple[int, ...]:
    """Returns the dimensions that a call reduces, joins or cuts; empty if it names none."""
    at = _ALONG[name]
    value = call.args[at] if len(call.args) > at else call.kwargs.get("dim", _DEFAULT_DIM.get(name))
    if value is None or isinstance(value, bool | float | DType):
        return ()
    dims = value if isinstance(value, tuple) else (value,)
    return tuple(dim % max(rank, 1) for dim in dims if isinstance(dim, int))
