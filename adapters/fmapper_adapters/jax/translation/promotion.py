"""Dtypes of written code: JAX's promotion beside PyTorch's."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper.programs import Scalar
from fmapper.translation import Value, expr, literal, text
from fmapper_adapters.jax.aten import types
from fmapper_adapters.jax.translation.table import HALVES, dtype_code

NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
_MAKERS = {"jnp.array", "jnp.asarray"}


def narrow(name: str) -> str:
    """Returns the dtype that JAX has for one of PyTorch's: 64 bits are 32."""
    return NARROW.get(name, name)


def is_half(name: str) -> bool:
    """Returns whether a dtype is one of 16 bits, which PyTorch adds up in float32."""
    return name in HALVES


def is_float(name: str) -> bool:
    """Returns whether a dtype is floating."""
    return name.startswith(("float", "bfloat"))


def is_complex(name: str) -> bool:
    """Returns whether a dtype is complex."""
    return name.startswith("complex")


def is_int(name: str) -> bool:
    """Returns whether a dtype is of integers, bool not included."""
    return name.startswith(("int", "uint"))


def convert(x: Any, dtype: str) -> Any:
    """Returns an array in a dtype; itself where it has it already."""
    if isinstance(x, Value):
        if narrow(x.dtype) == narrow(dtype) or _is_size(x):
            return x
        return Value(expr("{0}.astype({1})", x, dtype_code(dtype)), dtype, x.shape)
    return expr("{0}.astype({1})", x, dtype_code(dtype))


def widen(x: Value) -> Value:
    """Casts halves to float32."""
    return convert(x, "float32") if is_half(x.dtype) else x


def fits(number: Any, dtype: str) -> bool:
    """Returns whether a dtype holds a number; anything but an integer does."""
    if not isinstance(number, int) or isinstance(number, bool) or not is_int(dtype):
        return True
    span = np.iinfo(narrow(dtype))
    return bool(span.min <= number <= span.max)


def torch_dtype(*operands: Any) -> str:
    """Returns the dtype that PyTorch computes in from arrays and numbers."""
    stand_ins = (_stand_in(operand) for operand in operands if operand is not None)
    return types.result_type(*stand_ins).name


def _stand_in(operand: Any) -> Any:
    if _is_size(operand):
        return 1
    if isinstance(operand, Value):
        return np.zeros((1,) * bool(operand.ndim), types.dtype_of(operand.dtype))
    if isinstance(operand, Scalar):
        return np.zeros((), types.dtype_of(operand.dtype))
    return 1 if isinstance(operand, ast.AST) else operand


def promote(operands: Iterable[Any], dtype: str = "") -> list[Any] | None:
    """Casts operands so that JAX computes in the dtype of PyTorch.

    Args:
        operands: Arrays, numbers and sizes.
        dtype: The dtype to compute in, where it is another one than that of the operands.

    Returns:
        The operands, some of them cast; None where JAX has no number like one of them.
    """
    found = list(operands)
    wanted = narrow(dtype or torch_dtype(*found))
    if not all(fits(operand, wanted) for operand in found):
        return None
    if jax_dtype("jnp.where(True, {0}, {1})", *found) != wanted:
        found = [convert(x, wanted) if isinstance(x, Value) else x for x in found]
    return found


def jax_dtype(template: str, *operands: Any) -> str:
    """Returns the dtype that code has for arrays of these dtypes and for numbers.

    A template for two takes more of them from left to right.
    """
    kinds = tuple(_kind(operand) for operand in operands)
    if "{1}" in template and "{2}" not in template:
        found = kinds[0]
        for kind in kinds[1:]:
            found = _result(template, (found, kind))
        return str(found) if isinstance(found, str) else "float32"
    return str(_result(template, kinds))


def _is_size(operand: Any) -> bool:
    """Returns whether an operand is a number that is computed of sizes."""
    return isinstance(operand, Value) and not operand.dtype


def _kind(operand: Any) -> Any:
    if _is_size(operand):
        return 1
    if isinstance(operand, Value | Scalar):
        return narrow(operand.dtype)
    return 1 if isinstance(operand, ast.AST) else operand


def _result(template: str, kinds: tuple[Any, ...]) -> str:
    return _cached_result(template, tuple((type(kind), kind) for kind in kinds))


@functools.lru_cache(maxsize=4096)
def _cached_result(template: str, kinds: tuple[Any, ...]) -> str:
    names = [f"operand_{i}" for i in range(len(kinds))]
    code = text(expr(template, *map(expr, names)))
    given: dict[str, Any] = {
        name: kind
        for name, (_, kind) in zip(names, kinds, strict=True)
        if not isinstance(kind, str)
    }
    arrays = {
        name: jax.ShapeDtypeStruct((2,), kind)  # type: ignore[no-untyped-call]
        for name, (_, kind) in zip(names, kinds, strict=True)
        if isinstance(kind, str)
    }

    def run(arrays: Any) -> Any:
        return eval(code, {"jnp": jnp, "jax": jax, **given, **arrays})

    found = jax.eval_shape(run, arrays)
    return "weak" if getattr(found, "weak_type", False) else str(found.dtype)


def number_in(x: Any) -> Any:
    """Returns the number behind an array of one element in the code, else the array."""
    if isinstance(x, Scalar):
        return x.value
    if isinstance(x, Value) and not x.shape and isinstance(x.node, ast.Call) and x.node.args:
        made = text(x.node.func)
        if made in _MAKERS or made == f"jnp.{narrow(x.dtype)}":
            try:
                return ast.literal_eval(x.node.args[0])
            except ValueError:
                found = text(x.node.args[0])
                ends = {"float('inf')", "float('-inf')", "float('nan')", "-jnp.inf", "jnp.inf"}
                return x.node.args[0] if found in ends else x
    return x


def is_number(x: Any, *values: float) -> bool:
    """Returns whether an argument is one of these numbers."""
    return isinstance(x, int | float) and not isinstance(x, bool) and x in values


def number(x: Any) -> Any:
    """Returns a number as it is written: infinities as those of `jnp`."""
    if isinstance(x, float) and x in (float("inf"), float("-inf")):
        return expr("jnp.inf" if x > 0 else "-jnp.inf")
    if isinstance(x, float) and math.isnan(x):
        return expr("jnp.nan")
    return x


def call_of(function: str, *args: Any, **kwargs: Any) -> ast.expr:
    """Returns a call with the arguments that are given; keywords that are None are left out."""
    return ast.Call(
        expr(function),
        [literal(arg) for arg in args],
        [ast.keyword(key, literal(value)) for key, value in kwargs.items() if value is not None],
    )


def method(x: Any, name: str, *args: Any, **kwargs: Any) -> ast.expr:
    """Returns the call of a method of an array."""
    return ast.Call(
        ast.Attribute(literal(x), name, ast.Load()),
        [literal(arg) for arg in args],
        [ast.keyword(key, literal(value)) for key, value in kwargs.items() if value is not None],
    )


def is_simple(x: Any) -> bool:
    """Returns whether code may be written twice: it is a name, and computes nothing."""
    node = x.node if isinstance(x, Value) else x
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
