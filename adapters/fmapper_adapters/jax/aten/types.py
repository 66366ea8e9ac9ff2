"""PyTorch's type promotion, and the dtypes in which it computes.

The rules are those of
https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc: arrays with
dimensions outrank arrays without, which outrank Python numbers, unless the lower one is of a higher
category (bool < integer < floating < complex).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from fmapper import LossyCastError

Dtype = np.dtype[Any]

_default: ContextVar[str] = ContextVar("default dtype", default="float32")
_COMPLEX_OF = {"float16": "complex64", "bfloat16": "complex64", "float32": "complex64"}


@contextlib.contextmanager
def default_dtype_is(name: str) -> Iterator[None]:
    """Sets, within the block, the dtype of Python floats among integer arrays."""
    token = _default.set(name)
    try:
        yield
    finally:
        _default.reset(token)


def default_dtype() -> Dtype:
    """Returns torch's default dtype for floats."""
    return dtype_of(_default.get())


def dtype_of(name: str) -> Dtype:
    """Returns JAX's dtype of a name: 64 bits are 32 unless `jax_enable_x64` is set."""
    return np.dtype(jax.dtypes.canonicalize_dtype(name))


def is_number(x: Any) -> bool:
    """Returns whether a value is a Python number, or represents a number in a trace."""
    return not isinstance(x, jax.Array | np.ndarray) or (x.ndim == 0 and is_weak(x))


def is_weak(x: Any) -> bool:
    """Returns whether an array represents a Python number."""
    return bool(getattr(x, "weak_type", False))


def as_number(x: Any) -> Any:
    """Returns a one-element array as a weak one, promoted like a Python number."""
    if not isinstance(x, jax.core.Tracer):
        return jnp.asarray(x).item()
    x = x.reshape(())
    return convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def is_floating(x: Any) -> bool:
    """Returns whether an array or a dtype is floating, complex not included."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.floating))


def is_complex(x: Any) -> bool:
    """Returns whether an array or a dtype is complex."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.complexfloating))


def is_integral(x: Any) -> bool:
    """Returns whether an array or a dtype is of integers, bool not included."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.integer))


def category(dtype: Any) -> str:
    """Returns bool, int, float or complex."""
    if np.dtype(dtype) == bool:
        return "bool"
    if is_integral(np.dtype(dtype)):
        return "int"
    return "complex" if is_complex(np.dtype(dtype)) else "float"


def result_type(*operands: Any) -> Dtype:
    """Returns the dtype of torch's result for arrays and numbers, ignoring None."""
    ranks: list[Dtype | None] = [None, None, None]  # with dimensions, without, numbers
    for operand in operands:
        if operand is None:
            continue
        if is_number(operand):
            rank, dtype = 2, _dtype_of_number(operand)
        else:
            rank, dtype = (0 if operand.ndim else 1), np.dtype(operand.dtype)
        previous = ranks[rank]
        ranks[rank] = dtype if previous is None else jnp.promote_types(previous, dtype)
    common = _combine(ranks[0], _combine(ranks[1], ranks[2]))
    if common is None:
        raise TypeError("no operand to take a dtype from")
    return dtype_of(common.name)


def promote(*operands: Any, to_float: bool = False) -> tuple[Any, ...]:
    """Returns arrays of one dtype, as torch promotes the operands of an elementwise operation.

    Args:
        operands: Arrays and numbers; None stays None.
        to_float: Integers become the default floating dtype, as in division and `sin`.
    """
    dtype = result_type(*operands)
    if to_float and not is_floating(dtype) and not is_complex(dtype):
        dtype = default_dtype()
    return tuple(None if x is None else cast(x, dtype) for x in operands)


def promote_arrays(*operands: Any) -> list[Any]:
    """Returns arrays of one dtype; arrays without dimensions are not outranked."""
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in operands))
    return [cast(x, dtype) for x in operands]


def cast(x: Any, dtype: Any) -> jax.Array:
    """Casts an array or a number as C does: towards zero, and wrapping."""
    dtype = dtype_of(np.dtype(dtype).name)
    if isinstance(x, int) and not isinstance(x, bool) and is_integral(dtype):
        return jnp.asarray(_wrap_integer(x, dtype), dtype)
    if isinstance(x, bool | int | float | complex):
        if isinstance(x, complex) and not is_complex(dtype):
            x = x.real
        return jnp.asarray(x, dtype)
    array = jnp.asarray(x)
    if is_complex(array) and not is_complex(dtype) and dtype.kind != "b":
        array = array.real
    if is_floating(array) and is_integral(dtype):
        return _to_integer(array, dtype)
    if array.dtype == bool and (is_floating(dtype) or is_complex(dtype)):
        # XLA turns a product with a bool that it has seen cast into a select: 0 * inf is not NaN.
        return jnp.where(array, jnp.ones((), dtype), jnp.zeros((), dtype))
    return array.astype(dtype)


def _to_integer(x: Any, dtype: Dtype) -> jax.Array:
    """Converts as x86 does: values out of range become the smallest integer."""
    if dtype.itemsize >= 4:
        outside = jnp.isnan(x) | (x >= 2.0**63)
        return jnp.where(outside, np.iinfo(dtype).min, x.astype(dtype))
    x = x.astype(jnp.promote_types(x.dtype, np.float32))  # float16 cannot hold the bound
    outside = jnp.isnan(x) | (jnp.abs(x) >= 2.0**31)
    return jnp.where(outside, 0, x).astype(np.int32).astype(dtype)


def _wrap_integer(x: int, dtype: Dtype) -> int:
    """Wraps an integer to its dtype; int64's limits become int32's if JAX uses int32."""
    span = np.iinfo(dtype)
    low, high = int(span.min), int(span.max)
    if low <= x <= high:
        return x
    if dtype.itemsize == 4 and dtype_of("int64").itemsize == 4:
        if x in (-(2**63), 2**63 - 1):
            return high if x > high else low
        raise LossyCastError(
            f"{x} does not fit into JAX's 32-bit integers. Set "
            'jax.config.update("jax_enable_x64", True), or use a smaller number.'
        )
    return (x - low) % (high - low + 1) + low


def within(x: Any, like: Any) -> Any:
    """Returns a number as a bound of integers, infinite beyond 32 bits."""
    is_integer = isinstance(x, int) and not isinstance(x, bool) and is_integral(like)
    if not is_integer or x in (-(2**63), 2**63 - 1) or dtype_of("int64").itemsize == 8:
        return x
    return x if -(2**31) <= x < 2**31 else math.copysign(math.inf, x)


def saturate(x: Any) -> Any:
    """Clamps a number to the range of an integer dtype of JAX."""
    if not isinstance(x, int) or dtype_of("int64").itemsize == 8:
        return x
    return min(max(x, -(2**31)), 2**31 - 1)


def wide(dtype: Any) -> Dtype:
    """Returns the dtype in which torch accumulates: float32 for halves, itself for the others."""
    dtype = np.dtype(dtype)
    return np.dtype("float32") if dtype.name in ("float16", "bfloat16") else dtype


def to_complex(dtype: Any) -> Dtype:
    """Returns the complex dtype of a floating one."""
    name = np.dtype(dtype).name
    return (
        dtype_of(_COMPLEX_OF.get(name, "complex128"))
        if is_floating(np.dtype(dtype))
        else (dtype_of(name))
    )


def _dtype_of_number(x: Any) -> Dtype:
    if isinstance(x, bool):
        return np.dtype(bool)
    if isinstance(x, float):
        return default_dtype()
    if isinstance(x, complex):
        return to_complex(default_dtype())
    if is_weak(x):
        if is_floating(x):
            return default_dtype()
        return to_complex(default_dtype()) if is_complex(x) else np.dtype(x.dtype)
    return dtype_of("int64")  # an int, or a symbolic size of JAX


def _combine(higher: Dtype | None, lower: Dtype | None) -> Dtype | None:
    if higher is None or lower is None:
        return lower if higher is None else higher
    if is_complex(higher):
        return higher
    if is_floating(higher):
        return to_complex(higher) if is_complex(lower) else higher
    if higher.kind == "b" or is_floating(lower) or is_complex(lower):
        return np.dtype(jnp.promote_types(higher, lower))
    return higher
