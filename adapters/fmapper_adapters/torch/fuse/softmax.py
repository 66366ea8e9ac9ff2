"""Softmax and its logarithm."""

from __future__ import annotations

from typing import Any

from fmapper.programs import Call, Ref


def find(rewriter: Any, call: Call) -> Any | None:
    """Finds `exp(x - m) / sum(exp(x - m))`, where m is the largest x; others may overflow."""
    look = rewriter.look
    if call.op not in ("lax::div", "lax::sub"):
        return None
    if not call.result[0][0].startswith(("float", "bfloat")):
        return None
    shifted = _operand_of(look, call)
    if shifted is None:
        return None
    x, axis = shifted
    op = "torch::softmax" if call.op == "lax::div" else "torch::log_softmax"
    dtype, shape = call.result[0]
    return rewriter.call(op, x, axis=axis, shape=shape, dtype=dtype)


def _operand_of(look: Any, call: Call) -> tuple[Any, int] | None:
    """Returns the x of a softmax and its dimension."""
    top, bottom = call.args
    shape = tuple(call.result[0][1])
    if call.op == "lax::sub":  # (x - m) - log(sum(exp(x - m)))
        inner = look.call(look.origin(bottom)[0], "log")
        if inner is None or look.unreduce(bottom, shape, ()) is None:
            inner = look.call(bottom, "log")
        if inner is None:
            return None
        bottom = inner.args[0]
    total = look.call(look.origin(bottom)[0], "reduce_sum")
    if total is None or len(total.kwargs["axes"]) != 1:
        return None
    axis = total.kwargs["axes"][0]
    exponential = look.call(total.args[0], "exp")
    if exponential is None or look.unreduce(bottom, shape, (axis,)) != Ref(total.name):
        return None
    if look.shape(bottom)[axis : axis + 1] != (1,) or len(look.shape(bottom)) != len(shape):
        return None
    if call.op == "lax::div":
        if top != total.args[0]:
            return None
        difference = exponential.args[0]
    else:
        if top != exponential.args[0]:
            return None
        difference = top
    shift = look.call(difference, "sub")
    if shift is None or look.shape(difference) != shape or look.shape(shift.args[0]) != shape:
        return None
    if _largest_of(look, shift.args[1], shift.args[0], axis):
        return shift.args[0], axis
    return None


def _largest_of(look: Any, value: Any, x: Any, axis: int) -> bool:
    """Returns whether a value is the maximum of x along a dimension."""
    source = look.unreduce(value, look.shape(x), (axis,), detached=True)
    greatest = look.call(source, "reduce_max")
    if greatest is not None and tuple(greatest.kwargs["axes"]) == (axis,):
        return bool(greatest.args[0] == x) or _is_moved_largest(look, value, x, axis)
    return _is_moved_largest(look, value, x, axis)


def _is_moved_largest(look: Any, value: Any, x: Any, axis: int) -> bool:
    """Returns whether a value is the maximum before dimensions of x were moved, moved like x."""
    if len(look.shape(value)) != len(look.shape(x)):
        return False
    reduced, to_value = look.origin(value, detached=True)
    greatest = look.call(reduced, "reduce_max")
    if greatest is None:
        return False
    axes, inner = greatest.kwargs["axes"], greatest.args[0]
    (source, to_x), (other, to_inner) = look.origin(x), look.origin(inner)
    whole = [[i for i, n in enumerate(look.shape(operand)) if n != 1] for operand in (x, inner)]
    if source != other or [sorted(to_x.values()), sorted(to_inner.values())] != whole:
        return False
    left = [i for i in range(len(look.shape(inner))) if i not in axes]
    moved = {
        to_x[i]: to_value.get(left.index(dim)) for i, dim in to_inner.items() if dim not in axes
    }
    gone = [to_x[i] for i, dim in to_inner.items() if dim in axes]
    return gone == [axis] and all(here == there for here, there in moved.items())
