"""Drops broadcasts that torch's functions do themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fmapper.programs import Call, Scalar

_BINARY = {"add", "add_any", "sub", "mul", "div", "max", "min", "eq", "ne", "lt", "le", "gt", "ge"}
_BINARY |= {"and", "or", "pow", "atan2"}


def find(rewriter: Any, call: Call) -> Any | None:
    """Drops a broadcast of an operand to the shape of another one."""
    name = call.op.removeprefix("lax::")
    if name not in _BINARY and name != "select_n":
        return None
    look = rewriter.look
    dtype, shape = call.result[0]
    if not dtype.startswith(("float", "bfloat", "bool", "int")):
        return None
    args = list(call.args)
    if name == "select_n" and (len(args) != 3 or look.dtype(args[0]) != "bool"):
        return None
    full = [
        i
        for i, arg in enumerate(args)
        if look.shape(arg) == tuple(shape) and not _is_broadcast(look, arg)
    ]
    if not full or (name == "select_n" and full == [0]):
        return None
    changed = False
    for i, arg in enumerate(args):
        if (
            i in full
            or isinstance(arg, Scalar)
            or ("int" in look.dtype(arg) and look.dtype(arg)[:1] == "u")
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


def _is_broadcast(look: Any, value: Any) -> bool:
    return look.call(value, "broadcast_in_dim") is not None


def _smaller(rewriter: Any, value: Any, shape: tuple[Any, ...], *, scalar: bool) -> Any | None:
    """Returns a smaller value that torch broadcasts to the same one; None if there is none."""
    look = rewriter.look
    number = look.number(value)
    if number is not None:
        return Scalar(number, look.dtype(value)) if scalar else None
    source, at = look.origin(value)
    if source == value:
        return None
    source_shape = look.shape(source)
    offset = len(shape) - len(source_shape)
    if offset < 0:
        return None
    if all(at.get(i, i + offset) == i + offset for i in range(len(source_shape))):
        return source
    return None
