"""Means over dimensions."""

from __future__ import annotations

from typing import Any

from fmapper.programs import Call, Ref


def find(rewriter: Any, call: Call) -> Any | None:
    """Recognises a sum divided by the number of its terms."""
    if call.op != "lax::div" or call.result[0][0] not in ("float32", "float64"):
        return None  # sums of float16 overflow in JAX
    look = rewriter.look
    found = look.mean_of(Ref(call.name))
    if found is None:
        return None
    x, axes = found
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
