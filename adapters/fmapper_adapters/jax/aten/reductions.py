"""Sums, means, extremes and other reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.extremes import axes, elements_at, largest, smallest
from fmapper_adapters.jax.aten.matrices.norms import vector_norm
from fmapper_adapters.jax.aten.pointwise.comparisons import is_nan
from fmapper_adapters.jax.aten.pointwise.special import logaddexp
from fmapper_adapters.jax.aten.table import along, lowering, reduces
from fmapper_adapters.jax.aten.types import (
    cast,
    dtype_of,
    is_complex,
    is_floating,
    is_integral,
    promote,
    wide,
)


def count_of(x: Any, dims: Sequence[int]) -> Any:
    """Counts the elements that are reduced to one result."""
    return math.prod(x.shape[d] for d in dims)


def _inexact(x: Any) -> bool:
    return is_floating(x) or is_complex(x)


# --- sums and products ----------------------------------------------------------------------


@lowering("aten::sum", whole=False, dims=reduces("dim", 1))
def total(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """Returns the sum; integers and bool give int64, halves are added in float32."""
    if dtype is None:
        dtype = x.dtype if _inexact(x) else dtype_of("int64")
    x = cast(x, dtype)
    return jnp.sum(x.astype(wide(dtype)), axes(x, dim), keepdims=keepdim).astype(dtype)


@lowering("aten::nansum")
def nansum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """Returns the sum without NaN."""
    if _inexact(x):
        x = jnp.where(is_nan(x), jnp.zeros((), x.dtype), x)
    return total(x, dim, keepdim, dtype=dtype)


@lowering("aten::mean", dims=reduces("dim", 1))
def mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """Returns the mean, halves in float32; NaN for empty arrays."""
    dtype = x.dtype if dtype is None else dtype
    x = cast(x, dtype)
    return jnp.mean(x.astype(wide(dtype)), axes(x, dim), keepdims=keepdim).astype(dtype)


@lowering("aten::prod", dims=reduces("dim", 1))
def prod(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """Returns the product; integers and bool give int64."""
    if dtype is None:
        dtype = x.dtype if _inexact(x) else dtype_of("int64")
    x = cast(x, dtype)
    if np.dtype(dtype).kind == "b":
        return jnp.all(x, axes(x, dim), keepdims=keepdim)
    return jnp.prod(x.astype(wide(dtype)), axes(x, dim), keepdims=keepdim).astype(dtype)


def _variance(
    x: Any, dim: Any, correction: Any, keepdim: bool, most: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the variance divided by the square of a factor, that factor, and the mean."""
    dims = axes(x, dim)
    y = x.astype(wide(x.dtype))
    centre = jnp.mean(y, dims, keepdims=True)
    apart = y - centre

    def total(apart: Any, keepdims: bool) -> jax.Array:
        squares = apart.real**2 + apart.imag**2 if is_complex(apart) else apart * apart
        return jnp.sum(squares, dims, keepdims=keepdims)

    # torch sums in double precision; here, differences are scaled if squares would overflow
    overflows = jnp.isinf(jax.lax.stop_gradient(total(apart, True)))
    factor = jnp.where(overflows, most, 1).astype(y.real.dtype)
    left = count_of(x, dims) - (1 if correction is None else correction)
    spread = total(apart / factor, keepdim)
    spread = spread / jnp.maximum(jnp.asarray(left, spread.dtype), 0)
    if not keepdim:
        factor, centre = jnp.squeeze(factor, dims), jnp.squeeze(centre, dims)
    return spread, factor, centre.astype(x.dtype)


def _each_of_both(target: str, most: float, part: Callable[..., Any]) -> None:
    """Registers a function of the variance, which also returns the mean if its name has one."""

    def of_axes(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        spread, factor, mean = _variance(x, dim, correction, keepdim, most)
        dtype = x.real.dtype if is_complex(x) else x.dtype
        result = part(spread, factor, dtype)
        return (result, mean) if target.endswith("_mean") else result

    def of_all(x: Any, unbiased: bool = True) -> Any:
        return of_axes(x, correction=int(unbiased))

    def of_dims(x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
        return of_axes(x, dim, correction=int(unbiased), keepdim=keepdim)

    lowering(f"aten::{target}.correction", dims=reduces("dim", 1))(of_axes)
    lowering(f"aten::{target}.default", dims=reduces("dim", 1))(of_all)
    lowering(f"aten::{target}.dim", dims=reduces("dim", 1))(of_dims)


def _spread(spread: Any, factor: Any, dtype: Any) -> jax.Array:
    return (spread * factor * factor).astype(dtype)


def _root(spread: Any, factor: Any, dtype: Any) -> jax.Array:
    """Returns the standard deviation, whose gradient at zero is zero, as in torch."""
    zero = spread == 0
    return (jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, spread))) * factor).astype(dtype)


_each_of_both("var", 2.0**35, _spread)
_each_of_both("std", 2.0**70, _root)
_each_of_both("var_mean", 2.0**35, _spread)
_each_of_both("std_mean", 2.0**70, _root)


@lowering("aten::renorm")
def renorm(x: Any, p: Any, dim: int, maxnorm: Any) -> jax.Array:
    """Returns slices along a dimension, scaled so that no norm is above `maxnorm`."""
    others = tuple(d for d in range(x.ndim) if d != dim % x.ndim)
    size = vector_norm(x.astype(jnp.promote_types(x.dtype, "float32")), p, others, True)
    factor = jnp.where(size > maxnorm, maxnorm / (size + 1e-7), 1)
    return (x * factor.astype(wide(x.dtype))).astype(x.dtype)


# --- any, all, counts -----------------------------------------------------------------------


@lowering("aten::any", int64="looks", dims=reduces("dim", 1))
def any_of(x: Any, dim: Any = None, keepdim: bool = False) -> jax.Array:
    """Returns whether some element is not zero; of uint8 as uint8."""
    dims = () if dim == () else axes(x, dim)
    result = jnp.any(x.astype(bool), dims, keepdims=keepdim)
    return result.astype(x.dtype) if x.dtype == np.uint8 else result


@lowering("aten::all", whole=False, int64="looks", dims=reduces("dim", 1))
def all_of(x: Any, dim: Any = None, keepdim: bool = False) -> jax.Array:
    """Returns whether no element is zero; of uint8 as uint8."""
    dims = () if dim == () else axes(x, dim)
    result = jnp.all(x.astype(bool), dims, keepdims=keepdim)
    return result.astype(x.dtype) if x.dtype == np.uint8 else result


@lowering("aten::_is_all_true")
def is_all_true(x: Any) -> jax.Array:
    """Returns whether all elements are true."""
    return jnp.all(x)


@lowering("aten::_is_any_true")
def is_any_true(x: Any) -> jax.Array:
    """Returns whether some element is true."""
    return jnp.any(x)


@lowering("aten::count_nonzero")
def count_nonzero(x: Any, dim: Any = None) -> jax.Array:
    """Counts the elements that are not zero."""
    return jnp.sum((x != 0).astype(dtype_of("int64")), axes(x, dim))


# --- softmax and logsumexp ------------------------------------------------------------------


@lowering("aten::softmax", "aten::_softmax", dims=along("dim", 1))
def softmax(x: Any, dim: int, half_to_float: Any = False, *, dtype: Any = None) -> jax.Array:
    """Computes softmax; rows of -inf give NaN, as in torch. Halves in float32."""
    # the third argument of aten::softmax.int is the dtype, of aten::_softmax a flag
    if dtype is None and half_to_float is not None and not isinstance(half_to_float, bool):
        dtype = half_to_float
    x = x if dtype is None else cast(x, dtype)
    result = jnp.dtype("float32") if half_to_float is True else x.dtype
    if x.ndim == 0:
        return softmax(x[None], 0, half_to_float is True)[0]
    if x.size == 0:  # torch takes integers and bools here, and here only
        return x.astype(result)
    y = x.astype(wide(x.dtype)) if is_floating(x) else x
    top = jax.lax.stop_gradient(jnp.max(y, dim, keepdims=True, initial=-jnp.inf))
    unnormalised = jnp.exp(y - top)
    return (unnormalised / jnp.sum(unnormalised, dim, keepdims=True)).astype(result)


@lowering("aten::log_softmax", "aten::_log_softmax", dims=along("dim", 1))
def log_softmax(x: Any, dim: int, half_to_float: Any = False, *, dtype: Any = None) -> jax.Array:
    """Returns the logarithm of softmax; halves in float32."""
    if dtype is None and half_to_float is not None and not isinstance(half_to_float, bool):
        dtype = half_to_float
    x = x if dtype is None else cast(x, dtype)
    result = jnp.dtype("float32") if half_to_float is True else x.dtype
    if x.ndim == 0:
        return log_softmax(x[None], 0, half_to_float is True)[0]
    if x.size == 0:
        return x.astype(result)
    y = x.astype(wide(x.dtype))
    top = jax.lax.stop_gradient(jnp.max(y, dim, keepdims=True, initial=-jnp.inf))
    shifted = y - top
    logs = jnp.log(jnp.sum(jnp.exp(shifted), dim, keepdims=True))
    return (shifted - logs).astype(result)


@lowering("aten::logsumexp", dims=reduces("dim", 1))
def logsumexp(x: Any, dim: Any, keepdim: bool = False) -> jax.Array:
    """Returns the logarithm of the sum of exponentials, without overflow."""
    (x,) = promote(x, to_float=True)
    dims = axes(x, dim)
    y = x.astype(wide(x.dtype))
    result = jax.scipy.special.logsumexp(y, dims, keepdims=keepdim)
    return result.astype(x.dtype)


# --- running reductions ---------------------------------------------------------------------


def _along(function: Callable[..., Any], x: Any, dim: int) -> jax.Array:
    return function(x, dim % x.ndim) if x.ndim else function(x[None], 0)[0]


@lowering("aten::cumsum", dims=along("dim", 1))
def cumsum(x: Any, dim: int, *, dtype: Any = None) -> jax.Array:
    """Returns running sums; integers and bool give int64."""
    if dtype is None:
        dtype = x.dtype if _inexact(x) else dtype_of("int64")
    y = cast(x, dtype).astype(wide(dtype))
    return _along(jax.lax.cumsum, y, dim).astype(dtype)


@lowering("aten::cumprod", dims=along("dim", 1))
def cumprod(x: Any, dim: int, *, dtype: Any = None) -> jax.Array:
    """Returns running products; integers and bool give int64."""
    if dtype is None:
        dtype = x.dtype if _inexact(x) else dtype_of("int64")
    y = cast(x, dtype).astype(wide(dtype))
    return _along(jax.lax.cumprod, y, dim).astype(dtype)


@lowering("aten::logcumsumexp")
def logcumsumexp(x: Any, dim: int) -> jax.Array:
    """Returns the logarithm of running sums of exponentials."""
    y = x.astype(wide(x.dtype))
    return _along(_logcumsumexp, y, dim).astype(x.dtype)


def _logcumsumexp(x: Any, dim: int) -> jax.Array:
    if not jnp.iscomplexobj(x) or not x.shape[dim]:
        return jax.lax.associative_scan(jnp.logaddexp, x, axis=dim)

    # sequential, since the imaginary part depends on the order
    def step(total: Any, row: Any) -> tuple[Any, Any]:
        total = logaddexp(row, total)
        return total, total

    rows = jnp.moveaxis(x, dim, 0)
    _, sums = jax.lax.scan(step, jnp.full_like(rows[0], -math.inf), rows)
    return jnp.moveaxis(sums, 0, dim)


@lowering("aten::cummax", int64="picks")
def cummax(x: Any, dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns running maxima and their last indices; after NaN all are NaN."""
    return _run(x, dim, lambda new, old: new >= old)


@lowering("aten::cummin", int64="picks")
def cummin(x: Any, dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns running minima and their last indices; after NaN all are NaN."""
    return _run(x, dim, lambda new, old: new <= old)


def _run(x: Any, dim: int, wins: Callable[..., Any]) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), dtype_of("int64"))
    dim %= x.ndim
    places = jax.lax.broadcasted_iota(dtype_of("int64"), x.shape, dim)

    def later(old: Any, new: Any) -> Any:
        (a, i), (b, j) = old, new
        # NaN wins over numbers, and a later NaN over an earlier one
        taken = jnp.where(is_nan(a), is_nan(b), is_nan(b) | wins(b, a))
        return jnp.where(taken, b, a), jnp.where(taken, j, i)

    if x.size == 0:
        return x, places
    _, index = jax.lax.associative_scan(later, (jax.lax.stop_gradient(x), places), axis=dim)
    return jnp.take_along_axis(x, index, dim), index


# --- order statistics -----------------------------------------------------------------------


@lowering("aten::median.default")
def median(x: Any, ignore_nan: bool = False) -> jax.Array:
    """Returns the lower median; NaN if an element is NaN, or if there are no elements."""
    if x.size == 0 and is_floating(x):
        return cast(math.nan, x.dtype)
    if x.size == 0:
        least = True if x.dtype == bool else np.iinfo(x.dtype).min if is_integral(x) else 0
        return jnp.asarray(least, x.dtype)
    value, _ = _median(x.reshape(-1), 0, keepdim=False, ignore_nan=ignore_nan)
    return _share_slope(x, value) if is_floating(x) else value


@lowering("aten::nanmedian.default")
def nanmedian(x: Any) -> jax.Array:
    """Returns the lower median without NaN."""
    return median(x, ignore_nan=True)


@jax.custom_jvp
def _share_slope(x: Any, value: Any) -> jax.Array:
    """Returns `value`, an element of `x`; its gradient is shared by all equal ones, as in torch."""
    return value


@_share_slope.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, value = primals
    equal = jnp.where(is_nan(value), is_nan(x), x == value)
    slope = jnp.sum(jnp.where(equal, tangents[0], 0)) / jnp.sum(equal)
    return value, slope.astype(value.dtype)


@lowering("aten::median.dim")
def median_dim(x: Any, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the lower median and its place; the first NaN if any."""
    return _median(x, dim, keepdim, ignore_nan=False)


@lowering("aten::nanmedian.dim")
def nanmedian_dim(x: Any, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the lower median without NaN, and its place."""
    return _median(x, dim, keepdim, ignore_nan=True)


def _median(x: Any, dim: int, keepdim: bool, *, ignore_nan: bool) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), dtype_of("int64"))
    order = jnp.argsort(jax.lax.stop_gradient(x), dim, stable=True).astype(dtype_of("int64"))
    bad = jnp.sum(is_nan(x).astype(dtype_of("int64")), dim, keepdims=True)
    good = x.shape[dim] - bad
    if ignore_nan:
        place = jnp.maximum(good - 1, 0) // 2
    else:
        place = jnp.where(bad > 0, good, (x.shape[dim] - 1) // 2)
    return elements_at(x, jnp.take_along_axis(order, place, dim), dim, keepdim)


@lowering("aten::mode")
def mode(x: Any, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the smallest of the most frequent elements, and its last index."""
    if x.ndim == 0:
        return x, jnp.zeros((), dtype_of("int64"))
    dim %= x.ndim
    fixed = jax.lax.stop_gradient(x)
    order = jnp.argsort(fixed, dim, stable=True).astype(dtype_of("int64"))
    ordered = jnp.take_along_axis(fixed, order, dim)
    places = jax.lax.broadcasted_iota(dtype_of("int64"), x.shape, dim)
    before = jnp.roll(ordered, 1, dim)
    starts = jnp.where((ordered != before) | (places == 0), places, 0)
    runs = places - jax.lax.cummax(starts, dim)
    longest = jnp.argmax(runs, dim, keepdims=True)
    return elements_at(x, jnp.take_along_axis(order, longest, dim), dim, keepdim)


# --- pieces of a dimension ------------------------------------------------------------------


@lowering("aten::segment_reduce")
def segment_reduce(
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> jax.Array:
    """Computes sums, means, products or extremes of pieces of a dimension, of given lengths."""
    if lengths is not None:
        ends = jnp.cumsum(lengths, -1)
        starts = ends - lengths
    else:
        starts, ends = offsets[..., :-1], offsets[..., 1:]

    def of_rows(data: Any, starts: Any, ends: Any) -> Any:
        places = jnp.arange(data.shape[0])[None]
        inside = (places >= starts[:, None]) & (places < ends[:, None])
        inside = inside.reshape(*inside.shape, *(1,) * (data.ndim - 1))
        pieces: dict[str, tuple[float, Callable[..., Any]]] = {
            "sum": (0, jnp.sum), "mean": (0, jnp.sum), "prod": (1, jnp.prod),
            "max": (-math.inf, largest), "min": (math.inf, smallest),
        }  # fmt: skip
        neutral, function = pieces[reduce]
        start = cast(neutral if initial is None else initial, data.dtype)
        kept = jnp.where(inside, data[None], cast(neutral, data.dtype))
        reduced = function(kept, 1)
        if reduce in ("sum", "mean"):
            reduced = reduced + start
        elif reduce == "prod":
            reduced = reduced * start
        else:
            reduced = (jnp.maximum if reduce == "max" else jnp.minimum)(reduced, start)
        if reduce != "mean":
            return reduced
        count = (ends - starts).reshape(-1, *(1,) * (data.ndim - 1)).astype(data.dtype)
        none = start if initial is not None else cast(math.nan, data.dtype)
        return jnp.where(count > 0, reduced / jnp.maximum(count, 1), none)

    for _ in range(axis):
        of_rows = jax.vmap(of_rows)
    return of_rows(data, starts, ends)
