"""Prints calls of torch's functions and methods."""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fmapper.translation import DType, Printing, Value, expr, literal

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and_": "&", "or_": "|",
    "xor": "^", "lshift": "<<", "rshift": ">>", "matmul": "@", "bitwise_and": "&",
    "bitwise_or": "|", "logical_and": "&", "logical_or": "|",
}  # fmt: skip
_PREFIX = {"neg": "-", "invert": "~", "inv": "~", "pos": "+", "logical_not": "~"}
# What builtin functions, whose signatures Python cannot see, do where it is not said.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "F.gelu": {"approximate": "none"},
    "F.rms_norm": {"weight": None, "eps": None},
}


def printer(op: str) -> Callable[..., Any] | None:
    """Returns the printer of an operation; None if it is none of torch's."""
    kind, _, name = op.partition("::")
    if kind == "tensor":
        return _METHODS.get(name) or functools.partial(_method, name)
    if kind == "sym" and name == "getitem":
        return _getitem
    if kind == "sym" and name in _INFIX:
        return functools.partial(_infix, _INFIX[name])
    if kind != "torch":
        return None
    own = _FUNCTIONS.get(name)
    if own is not None:
        return own
    place, _, last = name.rpartition(".")
    if place in ("operator", "torch"):
        if last in _INFIX:
            return functools.partial(_operator, name, _INFIX[last])
        if last in _PREFIX:
            return functools.partial(_prefix, name, _PREFIX[last])
    return functools.partial(_function, name)


def code(value: Any) -> ast.expr:
    """Returns an argument as an expression."""
    if isinstance(value, DType):
        return expr(f"torch.{value.name}")
    if isinstance(value, tuple):
        return ast.Tuple([code(one) for one in value], ast.Load())
    if value is ...:
        return ast.Constant(...)
    if isinstance(value, float) and math.isfinite(value):
        return literal(shortest(value))
    if isinstance(value, complex) and value.imag > 0 and str(value) == f"{value.imag:g}j":
        return ast.Constant(value)  # 1j
    return literal(value)


def shortest(value: float) -> float:
    """Returns a number that was one of float32 as the shortest that is the same there."""
    import numpy as np

    short = float(str(np.float32(value)))
    exact = float(np.float32(value)) == value
    return short if exact and abs(short) <= float(np.finfo(np.float32).max) else value


def _call(function: ast.expr, args: Any, kwargs: Mapping[str, Any]) -> ast.expr:
    keywords = [ast.keyword(key, _keyword(key, value)) for key, value in kwargs.items()]
    return ast.Call(function, [code(one) for one in args], keywords)


def _keyword(key: str, value: Any) -> ast.expr:
    if key == "device" and isinstance(value, Value):
        return expr("{0}.device", value)
    return code(value)


def _function(name: str, p: Printing, *args: Any, **kwargs: Any) -> ast.expr:
    return _call(expr(name), args, _significant_keywords(name, len(args), kwargs))


def _significant_keywords(name: str, given: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords that say something else than the defaults."""
    known = _defaults(name)
    return {
        key: value
        for key, value in kwargs.items()
        if not (key in known and not isinstance(value, Value | ast.AST) and value == known[key])
    }


@functools.cache
def _defaults(name: str) -> Mapping[str, Any]:
    if name in _DEFAULTS:
        return _DEFAULTS[name]
    place, _, last = name.rpartition(".")
    function = getattr({"F": F, "torch": torch}.get(place), last, None)
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return {}
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _method(name: str, p: Printing, owner: Any, *args: Any, **kwargs: Any) -> ast.expr:
    return _call(ast.Attribute(code(owner), name, ast.Load()), args, kwargs)


def _sizes(name: str, p: Printing, owner: Any, *args: Any, **kwargs: Any) -> ast.expr:
    """Writes `x.reshape(2, 3)` for `x.reshape((2, 3))`."""
    if len(args) == 1 and isinstance(args[0], tuple) and args[0]:
        args = args[0]
    return _method(name, p, owner, *args, **kwargs)


def _permute(p: Printing, owner: Any, *order: Any) -> ast.expr:
    if len(order) == 1 and isinstance(order[0], tuple):
        order = order[0]
    moved = [i for i, axis in enumerate(order) if i != axis]
    if len(moved) == 2:
        if moved == [0, 1] and len(order) == 2:
            return expr("{0}.T", owner)
        return expr("{0}.transpose({1}, {2})", owner, *moved)
    return _method("permute", p, owner, *order)


def _infix(sign: str, p: Printing, left: Any, right: Any) -> ast.expr:
    return expr(f"{{0}} {sign} {{1}}", code(left), code(right))


def _operator(name: str, sign: str, p: Printing, *args: Any, **kwargs: Any) -> ast.expr:
    if len(args) != 2 or kwargs or not any(isinstance(one, Value) for one in args):
        return _function(name, p, *args, **kwargs)
    return _infix(sign, p, *args)


def _prefix(name: str, sign: str, p: Printing, *args: Any, **kwargs: Any) -> ast.expr:
    return expr(f"{sign}{{0}}", code(args[0]))


def _getitem(p: Printing, owner: Any, at: Any) -> ast.expr:
    items = at if isinstance(at, tuple) else (at,)
    parts = [_item(one) for one in items]
    index = parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load())
    return ast.Subscript(code(owner), index, ast.Load())


def _item(value: Any) -> ast.expr:
    if isinstance(value, Mapping) and "slice" in value:
        low, high, step = (None if one is None else code(one) for one in value["slice"])
        if isinstance(step, ast.Constant) and step.value == 1:
            step = None
        if isinstance(low, ast.Constant) and low.value == 0:
            low = None
        return ast.Slice(low, high, step)
    return code(value)


def _narrow(p: Printing, owner: Any, dim: Any, start: Any, length: Any) -> ast.expr | None:
    if not isinstance(dim, int) or not isinstance(owner, Value) or isinstance(start, Value):
        return _function("torch.narrow", p, owner, dim, start, length)
    dim %= max(owner.ndim, 1)
    if isinstance(start, int) and isinstance(length, int):
        stop: Any = start + length
        if stop == owner.shape[dim]:
            stop = None
    elif isinstance(start, int) and start == 0:
        stop = length
    else:
        stop = expr("{0} + {1}", start, length)
    places = [{"slice": (None, None, None)}] * dim + [{"slice": (start, stop, None)}]
    return _getitem(p, owner, tuple(places))


def _select(p: Printing, owner: Any, dim: Any, index: Any) -> ast.expr:
    if not isinstance(dim, int) or isinstance(index, Value) or dim < 0:
        return _method("select", p, owner, dim, index)
    return _getitem(p, owner, (*[{"slice": (None, None, None)}] * dim, index))


def _threshold(p: Printing, x: Any, threshold: Any, value: Any, *rest: Any, **kw: Any) -> ast.expr:
    if (threshold, value) == (0.0, 0.0):
        return expr("F.relu({0})", x)
    return _function("F.threshold", p, x, threshold, value)


def _max_pool(p: Printing, x: Any, size: Any, stride: Any = None, *rest: Any, **kw: Any) -> Any:
    """Writes `F.max_pool2d(x, 2)`."""
    name = p.call.op.partition("::")[2]
    if rest:
        return _function(name, p, x, size, stride, *rest, **kw)
    stride = kw.pop("stride", stride)
    usual = {"padding": 0, "dilation": 1}
    kept = {key: _alike(value) for key, value in kw.items() if _alike(value) != usual.get(key)}
    if stride is not None and _alike(stride) != _alike(size):
        kept = {"stride": _alike(stride), **kept}
    return _function(name, p, x, _alike(size), **{k: v for k, v in kept.items() if v is not False})


def _alike(sizes: Any) -> Any:
    """Returns one size for several that are the same."""
    is_one = isinstance(sizes, tuple) and len(set(map(str, sizes))) == 1
    return sizes[0] if is_one else sizes


def _full(p: Printing, shape: Any, value: Any, **kwargs: Any) -> ast.expr:
    if shape == ():
        return _call(expr("torch.tensor"), (value,), kwargs)
    if isinstance(value, int | float) and value in (0, 1) and not isinstance(value, bool):
        kwargs = {k: v for k, v in kwargs.items() if (k, v) != ("dtype", DType("float32"))}
        return _call(expr("torch.ones" if value else "torch.zeros"), shape, kwargs)
    return _call(expr("torch.full"), (shape, value), kwargs)


_METHODS: dict[str, Callable[..., Any]] = {
    "permute": _permute,
    "reshape": functools.partial(_sizes, "reshape"),
    "view": functools.partial(_sizes, "view"),
    "expand": functools.partial(_sizes, "expand"),
    "repeat": functools.partial(_sizes, "repeat"),
    "t": lambda p, owner: expr("{0}.T", owner),
    "select": _select,
    "narrow": _narrow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "operator.getitem": _getitem,
    "operator.abs": lambda p, x: expr("abs({0})", code(x)),
    "torch.narrow": _narrow,
    "torch.select": _select,
    "F.threshold": _threshold,
    **{f"F.max_pool{dims}d": _max_pool for dims in (1, 2, 3)},
    "torch.full": _full,
    "torch.permute": _permute,
}
