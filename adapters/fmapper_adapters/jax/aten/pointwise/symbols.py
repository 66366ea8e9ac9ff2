"""Arithmetic of sizes and other numbers, and reading results that are tuples."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import as_number

for _name in ("add", "sub", "mul", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "pow",
              "floordiv", "mod", "and_", "or_", "lshift", "rshift", "abs"):  # fmt: skip
    lowering(f"sym::{_name}", returns_number=True)(getattr(operator, _name))


@lowering("sym::getitem", returns_number=True, int64="moves")
def getitem(x: Any, index: Any) -> Any:
    """Returns one result of several."""
    return x[index]


@lowering("aten::sym_size", returns_number=True, whole=False, int64="looks")
def sym_size(x: Any, dim: int) -> Any:
    """Returns a size as it is when the program is traced."""
    return x.shape[dim]


@lowering("aten::sym_numel", returns_number=True, int64="looks")
def sym_numel(x: Any) -> Any:
    """Returns the number of elements."""
    return math.prod(x.shape)


@lowering("sym::truediv", "sym::int_truediv", "sym::IntTrueDiv", returns_number=True)
def truediv(a: Any, b: Any) -> Any:
    """Returns the quotient as a float."""
    return a / b


@lowering("sym::sym_not", "sym::not_", returns_number=True)
def sym_not(a: Any) -> Any:
    """Computes logical not."""
    return jnp.logical_not(a) if isinstance(a, jax.Array) else not a


@lowering("sym::sym_ite", returns_number=True)
def sym_ite(condition: Any, a: Any, b: Any) -> Any:
    """Returns one of two numbers."""
    if isinstance(condition, jax.Array):
        return jnp.where(condition, a, b)
    return a if condition else b


@lowering("sym::sym_max", returns_number=True)
def sym_max(a: Any, b: Any) -> Any:
    """Returns the larger of two numbers."""
    return jnp.maximum(a, b) if _is_traced(a, b) else max(a, b)


@lowering("sym::sym_min", returns_number=True)
def sym_min(a: Any, b: Any) -> Any:
    """Returns the smaller of two numbers."""
    return jnp.minimum(a, b) if _is_traced(a, b) else min(a, b)


@lowering("sym::sym_sum", returns_number=True)
def sym_sum(values: Any) -> Any:
    """Returns the sum of numbers."""
    return sum(values)


@lowering("sym::sym_float", returns_number=True)
def sym_float(a: Any) -> Any:
    """Returns a number as a float."""
    return a * 1.0


@lowering("sym::sym_int", "sym::trunc", returns_number=True)
def sym_int(a: Any) -> Any:
    """Returns a number rounded towards zero."""
    return jnp.trunc(a) if isinstance(a, jax.Array) else math.trunc(a)


@lowering("sym::ceil", returns_number=True)
def ceil(a: Any) -> Any:
    """Returns a number rounded up."""
    return jnp.ceil(a) if isinstance(a, jax.Array) else math.ceil(a)


@lowering("sym::floor", returns_number=True)
def floor(a: Any) -> Any:
    """Returns a number rounded down."""
    return jnp.floor(a) if isinstance(a, jax.Array) else math.floor(a)


@lowering("sym::round", returns_number=True)
def round_to_even(a: Any, digits: int | None = None) -> Any:
    """Returns a number rounded to even."""
    return jnp.round(a, digits or 0) if isinstance(a, jax.Array) else round(a, digits)


@lowering("sym::_sym_sqrt", "sym::sym_sqrt", returns_number=True)
def sym_sqrt(a: Any) -> Any:
    """Returns the square root of a number."""
    return jnp.sqrt(a) if isinstance(a, jax.Array) else math.sqrt(a)


@lowering("aten::_local_scalar_dense", returns_number=True)
@lowering("aten::item", returns_number=True, whole=False)
def local_scalar_dense(x: Any) -> Any:
    """Returns the value of a one-element array: a number if known, else a weak array.

    A weak array counts as a Python number when dtypes are promoted.
    """
    return as_number(x)


@lowering("aten::_assert_scalar", "aten::_assert_async", returns_number=True)
def assert_scalar(condition: Any, message: str = "") -> Any:
    """Returns the condition, which the caller of the program checks."""
    return condition


@lowering("aten::_print", returns_number=True)
def print_values(text: str) -> None:
    """Prints when the program runs."""
    jax.debug.callback(print, text)


def _is_traced(*values: Any) -> bool:
    return any(isinstance(value, jax.Array) for value in values)
