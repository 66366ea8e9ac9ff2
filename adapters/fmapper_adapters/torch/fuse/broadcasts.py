"""Drops broadcasts that torch's functions do themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fmapper.programs import Call, Scalar
from fmapper_adapters.torch.fuse.graph_index import GraphIndex
from fmapper_adapters.torch.fuse.rewriter import Rewriter

_BINARY = {"add", "add_any", "sub", "mul", "div", "max", "min", "eq", "ne", "lt", "le", "gt", "ge"}
_BINARY |= {"and", "or", "pow", "atan2"}


def find(rewriter: Rewriter, call: Call) -> Any | None:
    """Drops a broadcast of an operand to the shape of another one."""
    name = call.op.removeprefix("lax::")
    if name not in _BINARY and name != "select_n":
        return None
    index = rewriter.index
    dtype, shape = call.result[0]
    if not dtype.startswith(("float", "bfloat", "bool", "int")):
        return None
    args = list(call.args)
    if name == "select_n" and (len(args) != 3 or index.dtype(args[0]) != "bool"):
        return None
    full = [
        i
        for i, arg in enumerate(args)
        if index.shape(arg) == tuple(shape) and not _is_broadcast(index, arg)
    ]
    if not full or (name == "select_n" and full == [0]):
        return None
    changed = False
    for i, arg in enumerate(args):
        if (
            i in full
            or isinstance(arg, Scalar)
            or ("int" in index.dtype(arg) and index.dtype(arg)[:1] == "u")
        ):
            continue
        small = _smaller(rewriter, arg, tuple(shape), scalar=name != "select_n" or i > 0)
        if small is not None and small != arg:
            args[i] = small
            changed = True
    if not changed:
        return None
    smaller = replace(call, args=tuple(args))
    return rewriter.call(smaller.op, *smaller.args, shape=shape, dtype=dtype, **smaller.kwargs)


def _is_broadcast(index: GraphIndex, value: Any) -> bool:
    return index.call(value, "broadcast_in_dim") is not None


def _smaller(rewriter: Rewriter, value: Any, shape: tuple[Any, ...], *, scalar: bool) -> Any | None:
    """Returns a smaller value that torch broadcasts to the same one; None if there is none."""
    index = rewriter.index
    number = index.number(value)
    if number is not None:
        return Scalar(number, index.dtype(value)) if scalar else None
    source, at = index.origin(value)
    if source == value:
        return None
    source_shape = index.shape(source)
    offset = len(shape) - len(source_shape)
    if offset < 0:
        return None
    if all(at.get(i, i + offset) == i + offset for i in range(len(source_shape))):
        return source
    return None
