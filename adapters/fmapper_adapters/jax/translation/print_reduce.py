"""Sums, means, extremes, orders and norms."""

from __future__ import annotations

from typing import Any

from fmapper.translation import Printing, Value, expr
from fmapper_adapters.jax.translation.promotion import (
    call_of,
    convert,
    is_complex,
    is_float,
    is_half,
    is_number,
    is_simple,
    method,
    narrow,
    widen,
)
from fmapper_adapters.jax.translation.table import prints


def axis_of(x: Value, dim: Any) -> Any:
    """Returns the axis of a reduction; None for all, which is what no dimensions mean."""
    if dim is None or dim == () or not x.ndim:
        return None
    dims = dim if isinstance(dim, tuple) else (dim,)
    if all(isinstance(d, int) for d in dims) and len({d % x.ndim for d in dims}) == x.ndim:
        return None
    return dims[0] if len(dims) == 1 else dims


def reduce(x: Value, name: str, dim: Any, keepdim: bool, **more: Any) -> Any:
    """Prints `x.name(axis=dim, keepdims=True)`."""
    return method(x, name, axis=axis_of(x, dim), keepdims=True if keepdim else None, **more)


@prints("aten::sum", "aten::prod")
def total(
    p: Printing, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Prints `x.sum(axis=dim)`; bool and small integers are added up as int32."""
    name = "sum" if p.call.op.startswith("aten::sum") else "prod"
    if p.dtype == "bool" or is_complex(x.dtype) != is_complex(p.dtype):
        return None
    counted = x.dtype == "bool" and narrow(p.dtype) == "int32" and name == "sum"
    x = x if counted else convert(x, p.dtype)
    if narrow(p.dtype) in ("int8", "int16", "uint8", "uint16", "uint32"):
        return None
    if is_half(p.dtype) and name == "prod":
        return convert(reduce(widen(x), name, dim, keepdim), p.dtype)
    return reduce(x, name, dim, keepdim)


@prints("aten::mean")
def mean(
    p: Printing, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Prints `x.mean(axis=dim)`."""
    return reduce(convert(x, p.dtype), "mean", dim, keepdim)


def _spread(x: Value, name: str, dim: Any, correction: Any, keepdim: bool) -> Any:
    if is_complex(x.dtype) or not float(correction).is_integer() or not x.ndim:
        return None
    if name == "var":
        return reduce(x, name, dim, keepdim, ddof=int(correction) or None)
    more = {"ddof": int(correction) or None, "keepdims": True if keepdim else None}
    return call_of("standard_deviation", x, axis=axis_of(x, dim), **more)


def _enter_spread(name: str) -> None:
    @prints(f"aten::{name}.correction")
    def by_correction(
        p: Printing, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> Any:
        return _either(x, name, dim, 1 if correction is None else correction, keepdim)

    @prints(f"aten::{name}.default")
    def of_all(p: Printing, x: Value, unbiased: bool = True) -> Any:
        return _either(x, name, None, int(unbiased), False)

    @prints(f"aten::{name}.dim")
    def of_dims(
        p: Printing, x: Value, dim: Any, unbiased: bool = True, keepdim: bool = False
    ) -> Any:
        return _either(x, name, dim, int(unbiased), keepdim)


def _either(x: Value, name: str, dim: Any, correction: Any, keepdim: bool) -> Any:
    spread = _spread(x, name.removesuffix("_mean"), dim, correction, keepdim)
    if not name.endswith("_mean") or spread is None:
        return spread
    if is_simple(x):
        return expr("({0}, {1})", spread, reduce(x, "mean", dim, keepdim))
    more = {"axis": axis_of(x, dim), "keepdims": True if keepdim else None}
    return call_of(name, x, **more, ddof=int(correction) or None)


for _name in ("var", "std", "var_mean", "std_mean"):
    _enter_spread(_name)


@prints("aten::amax", "aten::max.default")
def highest(p: Printing, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    """Prints `largest(x, axis=dim, shared=True)`, or `x.max(axis=dim)` of what has no gradient."""
    return _extreme(x, "max", dim, keepdim, shared=True)


@prints("aten::amin", "aten::min.default")
def lowest(p: Printing, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    """Prints `-largest(-x, axis=dim, shared=True)`, or `x.min(axis=dim)`."""
    return _extreme(x, "min", dim, keepdim, shared=True)


def _extreme(x: Value, name: str, dim: Any, keepdim: bool, *, shared: bool = False) -> Any:
    """Prints the largest or smallest elements with the gradient of torch, where they have one."""
    if not x.ndim or not is_float(x.dtype):
        return reduce(x, name, dim, keepdim)
    more = {"axis": axis_of(x, dim), "keepdims": keepdim or None, "shared": shared or None}
    if name == "max":
        return call_of("largest", x, **more)
    return expr("-{0}", call_of("largest", expr("-{0}", x), **more))


@prints("aten::any", "aten::all")
def some(p: Printing, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    """Prints `x.any(axis=dim)`."""
    if dim == ():
        return None
    found = reduce(x, p.call.op[6:9], dim, keepdim)
    return found if p.dtype == "bool" else convert(found, p.dtype)


@prints("aten::_is_all_true", "aten::_is_any_true")
def whether(p: Printing, x: Value) -> Any:
    """Prints `x.all()` or `x.any()`."""
    return expr("{0}.all()" if "all" in p.call.op else "{0}.any()", x)


@prints("aten::count_nonzero")
def count_nonzero(p: Printing, x: Value, dim: Any = None) -> Any:
    """Prints `jnp.count_nonzero(x, axis=dim)`."""
    return call_of("jnp.count_nonzero", x, axis=axis_of(x, dim))


@prints("aten::argmax", "aten::argmin")
def place(p: Printing, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    """Prints `x.argmax(axis=dim)`."""
    if not x.ndim:
        return None
    name = p.call.op[6:12]
    return method(x, name, axis=dim, keepdims=True if keepdim else None)


@prints("aten::max.dim", "aten::min.dim")
def extreme(p: Printing, x: Value, dim: int, keepdim: bool = False) -> Any:
    """Prints `(largest(x, axis=dim), x.argmax(axis=dim))`."""
    if not x.ndim:
        return None
    name = p.call.op[6:9]
    if not is_float(x.dtype) or (not is_simple(x) and p.picked != frozenset({0})):
        return call_of(f"{name}_with_index", x, dim, keepdims=True if keepdim else None)
    place = method(x, f"arg{name}", axis=dim, keepdims=True if keepdim else None)
    return expr("({0}, {1})", _extreme(x, name, dim, keepdim), place)


@prints("aten::cumsum", "aten::cumprod")
def cumulate(p: Printing, x: Value, dim: int, *, dtype: Any = None) -> Any:
    """Prints `jnp.cumsum(x, axis=dim)`."""
    if not x.ndim or p.dtype == "bool":
        return None
    name = p.call.op.partition("::")[2].partition(".")[0]
    if is_half(p.dtype):
        return convert(expr(f"jnp.{name}({{0}}, axis={{1}})", convert(x, "float32"), dim), p.dtype)
    if narrow(p.dtype) not in ("int32", "float32") and narrow(p.dtype) != narrow(x.dtype):
        return None
    return expr(f"jnp.{name}({{0}}, axis={{1}})", convert(x, p.dtype), dim)


@prints("aten::linalg_vector_norm")
def vector_norm(
    p: Printing,
    x: Value,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    """Prints `vector_norm(x, axis=dim)`, a function in the file, of halves in float32."""
    if not is_float(x.dtype) or not x.ndim or not isinstance(ord, int | float):
        return None
    if ord not in (1, 2, float("inf")):
        return None
    y = convert(x, "float32" if is_half(p.dtype) else p.dtype)
    more = {"axis": axis_of(x, dim), "keepdims": True if keepdim else None}
    if is_number(ord, 1):
        node = method(call_of("absolute", y), "sum", **more)
    elif is_number(ord, 2):
        node = call_of("vector_norm", y, **more)
    else:
        node = call_of("largest", call_of("absolute", y), **more, shared=True)
    return convert(node, p.dtype) if is_half(p.dtype) else node


@prints("aten::norm")
def norm(
    p: Printing, x: Value, p_: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Prints `vector_norm(x, axis=dim)`, a function in the file."""
    return vector_norm(p, x, 2 if p_ is None else p_, dim, keepdim, dtype=dtype)


# --- orders ---------------------------------------------------------------------------------


@prints("aten::sort")
def sort(
    p: Printing, x: Value, dim: int = -1, descending: bool = False, *, stable: Any = None
) -> Any:
    """Prints `(jnp.sort(x), jnp.argsort(x))`."""
    if not x.ndim:
        return None
    if is_simple(x):
        more = ", descending=True" if descending else ""
        template = "(jnp.sort({0}, axis={1}%s), jnp.argsort({0}, axis={1}%s))"
        return expr(template % (more, more), x, dim)
    return call_of("sort_with_index", x, dim, descending=True if descending else None)


@prints("aten::argsort")
def argsort(
    p: Printing, x: Value, dim: int = -1, descending: bool = False, *, stable: Any = None
) -> Any:
    """Prints `jnp.argsort(x, axis=dim)`."""
    if not x.ndim:
        return None
    more = True if descending else None
    return call_of("jnp.argsort", x, axis=dim, descending=more)


@prints("aten::topk")
def topk(
    p: Printing, x: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """Prints `jax.lax.top_k(x, k)`."""
    if not x.ndim or x.dtype == "bool" or is_complex(x.dtype):
        return None
    if largest and dim % x.ndim == x.ndim - 1:
        return expr("jax.lax.top_k({0}, {1})", x, k)
    return call_of("top_k", x, k, dim, largest=None if largest else False)


# --- losses -----------------------------------------------------------------------------------


@prints("aten::nll_loss_forward")
def nll_loss(
    p: Printing, x: Value, target: Value, weight: Any, reduction: Any, ignore_index: Any
) -> Any:
    """Prints `nll_loss(log_probs, target)`, a function in the file, for the mean of a batch."""
    is_usual = weight is None and is_number(reduction, 1) and x.ndim == 2
    if not is_usual or p.picked != frozenset({0}) or not is_float(x.dtype) or is_half(x.dtype):
        return None
    ignored = None if is_number(ignore_index, -100) else ignore_index
    return expr("({0}, None)", call_of("nll_loss", x, target, ignore_index=ignored))


@prints("aten::mse_loss")
def mse_loss(p: Printing, x: Value, target: Value, reduction: int = 1) -> Any:
    """Prints `jnp.square(x - target).mean()`."""
    return _loss(expr("jnp.square({0} - {1})", x, target), reduction, x, target)


@prints("aten::huber_loss")
def huber_loss(p: Printing, x: Value, target: Value, reduction: int = 1, delta: float = 1.0) -> Any:
    """Prints `huber_loss(x, target, delta).mean()`, a function in the file."""
    made = call_of("huber_loss", x, target, delta=None if is_number(delta, 1) else delta)
    return _loss(made, reduction, x, target)


@prints("aten::smooth_l1_loss")
def smooth_l1_loss(
    p: Printing, x: Value, target: Value, reduction: int = 1, beta: float = 1.0
) -> Any:
    """Prints `huber_loss(x, target).mean()`, divided by beta."""
    if not beta:
        return _loss(expr("absolute({0} - {1})", x, target), reduction, x, target)
    found = huber_loss(p, x, target, reduction, beta)
    return found if found is None or is_number(beta, 1) else expr("{0} / {1}", found, beta)


@prints("aten::binary_cross_entropy")
def binary_cross_entropy(
    p: Printing, x: Value, target: Value, weight: Value | None = None, reduction: int = 1
) -> Any:
    """Prints `binary_cross_entropy(x, target).mean()`, a function in the file."""
    if weight is not None:
        return None
    return _loss(call_of("binary_cross_entropy", x, target), reduction, x, target)


def _loss(each: Any, reduction: int, x: Value, target: Value) -> Any:
    """Returns the losses of all elements, their mean or their sum."""
    if x.dtype != target.dtype or not is_float(x.dtype) or is_half(x.dtype):
        return None
    return method(each, "mean" if reduction == 1 else "sum") if reduction else each
