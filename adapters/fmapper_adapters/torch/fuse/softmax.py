"""Softmax and its logarithm."""

from __future__ import annotations

from typing import Any

from fmapper.programs import Call, Ref
from fmapper_adapters.torch.fuse.graph_index import GraphIndex
from fmapper_adapters.torch.fuse.rewriter import Rewriter


def find(rewriter: Rewriter, call: Call) -> Any | None:
    """Finds `exp(x - m) / sum(exp(x - m))`, where m is the largest x; others may overflow."""
    index = rewriter.index
    if call.op not in ("lax::div", "lax::sub"):
        return None
    if not call.result[0][0].startswith(("float", "bfloat")):
        return None
    shifted = _operand_of(index, call)
    if shifted is None:
        return None
    x, axis = shifted
    op = "torch::softmax" if call.op == "lax::div" else "torch::log_softmax"
    dtype, shape = call.result[0]
    return rewriter.call(op, x, axis=axis, shape=shape, dtype=dtype)


def _operand_of(index: GraphIndex, call: Call) -> tuple[Any, int] | None:
    """Returns the x of a softmax and its dimension."""
    top, bottom = call.args
    shape = tuple(call.result[0][1])
    if call.op == "lax::sub":  # (x - m) - log(sum(exp(x - m)))
        inner = index.call(index.origin(bottom)[0], "log")
        if inner is None or index.unreduce(bottom, shape, ()) is None:
            inner = index.call(bottom, "log")
        if inner is None:
            return None
        bottom = inner.args[0]
    total = index.call(index.origin(bottom)[0], "reduce_sum")
    if total is None or len(total.kwargs["axes"]) != 1:
        return None
    axis = total.kwargs["axes"][0]
    exponential = index.call(total.args[0], "exp")
    if exponential is None or index.unreduce(bottom, shape, (axis,)) != Ref(total.name):
        return None
    if index.shape(bottom)[axis : axis + 1] != (1,) or len(index.shape(bottom)) != len(shape):
        return None
    if call.op == "lax::div":
        if top != total.args[0]:
            return None
        difference = exponential.args[0]
    else:
        if top != exponential.args[0]:
            return None
        difference = top
    shift = index.call(difference, "sub")
    if shift is None or index.shape(difference) != shape or index.shape(shift.args[0]) != shape:
        return None
    if _largest_of(index, shift.args[1], shift.args[0], axis):
        return shift.args[0], axis
    return None


def _largest_of(index: GraphIndex, value: Any, x: Any, axis: int) -> bool:
    """Returns whether a value is the maximum of x along a dimension."""
    source = index.unreduce(value, index.shape(x), (axis,), detached=True)
    greatest = index.call(source, "reduce_max")
    if greatest is not None and tuple(greatest.kwargs["axes"]) == (axis,):
        return bool(greatest.args[0] == x) or _is_moved_largest(index, value, x, axis)
    return _is_moved_largest(index, value, x, axis)


def _is_moved_largest(index: GraphIndex, value: Any, x: Any, axis: int) -> bool:
    """Returns whether a value is the maximum before dimensions of x were moved, moved like x."""
    if len(index.shape(value)) != len(index.shape(x)):
        return False
    reduced, to_value = index.origin(value, detached=True)
    greatest = index.call(reduced, "reduce_max")
    if greatest is None:
        return False
    axes, inner = greatest.kwargs["axes"], greatest.args[0]
    (source, to_x), (other, to_inner) = index.origin(x), index.origin(inner)
    whole = [[i for i, n in enumerate(index.shape(operand)) if n != 1] for operand in (x, inner)]
    if source != other or [sorted(to_x.values()), sorted(to_inner.values())] != whole:
        return False
    left = [i for i in range(len(index.shape(inner))) if i not in axes]
    moved = {
        to_x[i]: to_value.get(left.index(dim)) for i, dim in to_inner.items() if dim not in axes
    }
    gone = [to_x[i] for i, dim in to_inner.items() if dim in axes]
    return gone == [axis] and all(here == there for here, there in moved.items())
