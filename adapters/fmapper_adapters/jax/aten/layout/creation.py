"""New arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.table import fresh, lowering, pointwise
from fmapper_adapters.jax.aten.types import (
    cast,
    default_dtype,
    dtype_of,
    is_complex,
    is_floating,
    result_type,
    to_complex,
)


@lowering("aten::full", int64="moves", elements=(1,))
def full(size: Sequence[Any], fill_value: Any, *, dtype: Any = None) -> jax.Array:
    """Returns an array of one value."""
    dtype = result_type(fill_value) if dtype is None else dtype
    return jnp.broadcast_to(cast(fill_value, dtype), tuple(size))


@lowering("aten::full_like", int64="moves", elements=(1,), dims=pointwise)
def full_like(x: Any, fill_value: Any, *, dtype: Any = None) -> jax.Array:
    """Returns an array of one value, in the shape of another."""
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype)


@lowering("aten::new_full", int64="moves", elements=(2,), dims=fresh)
def new_full(x: Any, size: Sequence[Any], fill_value: Any, *, dtype: Any = None) -> jax.Array:
    """Returns an array of one value, in the dtype of another."""
    return full(size, fill_value, dtype=x.dtype if dtype is None else dtype)


@lowering("aten::empty", "aten::_efficientzerotensor")
@lowering("aten::zeros", whole=False)
def zeros(size: Sequence[Any], *, dtype: Any = None) -> jax.Array:
    """Returns zeros, also for arrays whose values are undefined."""
    return full(size, 0, dtype=default_dtype() if dtype is None else dtype)


@lowering("aten::empty_strided", "aten::empty_permuted")
def empty_strided(size: Sequence[Any], layout: Sequence[Any], *, dtype: Any = None) -> jax.Array:
    """Returns zeros; strides have no meaning here."""
    return zeros(size, dtype=dtype)


@lowering("aten::zeros_like", int64="looks", dims=pointwise)
@lowering("aten::empty_like", whole=False, int64="looks")
def zeros_like(x: Any, *, dtype: Any = None) -> jax.Array:
    """Returns zeros in the shape of another array."""
    return full_like(x, 0, dtype=dtype)


@lowering("aten::new_zeros", int64="looks", dims=fresh)
@lowering("aten::new_empty", whole=False, int64="looks", dims=fresh)
def new_zeros(x: Any, size: Sequence[Any], *, dtype: Any = None) -> jax.Array:
    """Returns zeros in the dtype of another array."""
    return new_full(x, size, 0, dtype=dtype)


@lowering("aten::new_empty_strided")
def new_empty_strided(
    x: Any, size: Sequence[Any], stride: Sequence[Any], *, dtype: Any = None
) -> jax.Array:
    """Returns zeros in the dtype of another array."""
    return new_full(x, size, 0, dtype=dtype)


@lowering("aten::ones", whole=False)
def ones(size: Sequence[Any], *, dtype: Any = None) -> jax.Array:
    """Returns ones."""
    return full(size, 1, dtype=default_dtype() if dtype is None else dtype)


@lowering("aten::ones_like", int64="looks", dims=pointwise)
def ones_like(x: Any, *, dtype: Any = None) -> jax.Array:
    """Returns ones in the shape of another array."""
    return full_like(x, 1, dtype=dtype)


@lowering("aten::new_ones", int64="looks", dims=fresh)
def new_ones(x: Any, size: Sequence[Any], *, dtype: Any = None) -> jax.Array:
    """Returns ones in the dtype of another array."""
    return new_full(x, size, 1, dtype=dtype)


@lowering("aten::scalar_tensor", int64="moves", elements=(0,))
def scalar_tensor(value: Any, *, dtype: Any = None) -> jax.Array:
    """Returns a number as an array; float unless a dtype is given."""
    return cast(value, default_dtype() if dtype is None else dtype)


@lowering("aten::resize")
def resize(x: Any, size: Sequence[Any], *, memory_format: Any = None) -> jax.Array:
    """Returns the elements row by row in another shape, with zeros behind the last one."""
    count = math.prod(size)
    flat = x.reshape(-1)[:count]
    return jnp.pad(flat, (0, count - flat.size)).reshape(size)


# --- ranges ---------------------------------------------------------------------------------


@lowering("aten::arange.default", whole=False)
def arange_to(end: Any, *, dtype: Any = None) -> jax.Array:
    """Returns the whole numbers below an end."""
    return arange(0, end, 1, dtype=dtype)


@lowering("aten::arange.start_step")
@lowering("aten::arange.start", whole=False)
def arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None) -> jax.Array:
    """Returns numbers from start to below end; the length is computed in float64, as in torch."""
    floats = any(isinstance(value, float) for value in (start, end, step))
    if dtype is None:
        dtype = default_dtype() if floats else dtype_of("int64")
    if not is_floating(dtype):
        wanted = math.ceil((end - start) / step) if floats else None
        start, end, step = (_truncate(value) for value in (start, end, step))
        length = -(-(end - start) // step) if step != 1 else end - start
        if wanted is not None and np.dtype(dtype) != dtype_of("int64"):
            length = wanted  # torch truncates before computing the length for int64 only
    else:
        are_numbers = all(isinstance(value, int | float) for value in (start, end, step))
        length = math.ceil((end - start) / step) if are_numbers else -(-(end - start) // step)
    if isinstance(length, int):
        length = max(length, 0)
    if is_floating(dtype) and all(isinstance(v, int | float) for v in (start, length, step)):
        # torch computes them in float64 and rounds once
        return jnp.asarray((start + np.arange(length, dtype=np.float64) * step).astype(dtype))
    inner = dtype if is_floating(dtype) else dtype_of("int64")
    return cast(cast(start, inner) + jnp.arange(length, dtype=inner) * cast(step, inner), dtype)


def _truncate(value: Any) -> Any:
    return int(value) if isinstance(value, float) else value


@lowering("aten::linspace")
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None) -> jax.Array:
    """Returns evenly spaced numbers from start to end, each computed from the nearer end."""
    if dtype is None:
        dtype = default_dtype()
        if any(isinstance(v, complex) or is_complex(jnp.asarray(v)) for v in (start, end)):
            dtype = to_complex(dtype)
    dtype = dtype_of(np.dtype(dtype).name)
    floating = is_floating(dtype) or is_complex(dtype)
    if not floating:
        start, end = (_truncate(value) for value in (start, end))
    inner = jnp.promote_types(dtype, "float32") if floating else dtype_of("float64")
    first, last = cast(start, inner), cast(end, inner)
    if steps == 1:
        return cast(first.reshape(1), dtype)
    step = (last - first) / max(steps - 1, 1)
    places = jnp.arange(steps)
    upwards = first + cast(places, inner) * step
    downwards = last - cast(steps - 1 - places, inner) * step
    return cast(jnp.where(places < steps // 2, upwards, downwards), dtype)


@lowering("aten::logspace")
def logspace(
    start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None
) -> jax.Array:
    """Returns powers of a base, with the exponents of linspace."""
    dtype = dtype_of(np.dtype(default_dtype() if dtype is None else dtype).name)
    if is_floating(dtype) or is_complex(dtype):
        inner = jnp.promote_types(dtype, "float32")
    else:
        inner = dtype_of("float64")
        start, end = (_truncate(value) for value in (start, end))
    exponents = linspace(start, end, steps, dtype=inner)
    return cast(jnp.power(cast(base, inner), exponents), dtype)


@lowering("aten::eye")
def eye(rows: Any, columns: Any = None, *, dtype: Any = None) -> jax.Array:
    """Returns ones on the diagonal."""
    columns = rows if columns is None else columns
    return jnp.eye(rows, columns, dtype=dtype_of(np.dtype(dtype or default_dtype()).name))


@lowering("aten::tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None) -> jax.Array:
    """Returns the places of the lower triangle of a matrix, row by row."""
    places = np.stack(np.tril_indices(row, offset, col))
    return jnp.asarray(places, dtype_of("int64") if dtype is None else dtype)


@lowering("aten::triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None) -> jax.Array:
    """Returns the places of the upper triangle of a matrix, row by row."""
    places = np.stack(np.triu_indices(row, offset, col))
    return jnp.asarray(places, dtype_of("int64") if dtype is None else dtype)
