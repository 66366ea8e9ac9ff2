"""Integers of 2 and 4 bits in programs, which are stored as bytes outside of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fmapper import LossyCastError

_HELD_IN = {"int4": "int8", "int2": "int8", "uint4": "uint8", "uint2": "uint8"}
# Results of these operations never need truncation; all others are truncated to the bits.
_CLOSED = frozenset(
    (
        *("reshape", "transpose", "slice", "broadcast_in_dim", "squeeze", "concatenate", "gather"),
        *("dynamic_slice", "dynamic_update_slice", "split", "select_n", "rev", "pad", "sort"),
        *("max", "min", "clamp", "reduce_max", "reduce_min", "cummax", "cummin", "and", "or"),
        *("xor", "rem", "sign", "shift_right_arithmetic", "stop_gradient", "copy", "copy_p"),
    )
)
# The results of these depend on the positions of bits, which differ in a byte.
_OTHER = frozenset(("bitcast_convert_type", "population_count", "clz", "shift_right_logical"))
_LOOPS = frozenset(("scan", "while", "cond"))  # their bodies are checked separately


def holder(dtype: str) -> str:
    """Returns the dtype that stores numbers of a dtype: bytes for those of few bits."""
    return _HELD_IN.get(dtype, dtype)


def in_bytes(array: Any) -> Any:
    """Returns an array as it is stored, integers of few bits as bytes."""
    name = str(array.dtype)
    return array.astype(_HELD_IN[name]) if name in _HELD_IN else array


def out_of_bytes(array: Any, dtype: str, name: str) -> Any:
    """Returns the integers of few bits that are stored in bytes.

    Raises:
        LossyCastError: The array holds numbers outside of the range.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(dtype=jnp.dtype(dtype))  # type: ignore[no-untyped-call]
    limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    if array.size and not int(limits.min) <= int(array.min()) <= int(array.max()) <= limits.max:
        raise LossyCastError(
            f"{name}: integers do not fit into {dtype}, their dtype in the model that was "
            f"converted (they are {array.dtype} now). Keep them in that range"
        )
    return array.astype(dtype)


def is_refused(eqn: Any) -> bool:
    """Returns whether an operation on such integers has no counterpart on bytes."""
    name = eqn.primitive.name
    if name in _LOOPS or not any(map(_is_of_few_bits, (*eqn.invars, *eqn.outvars))):
        return False
    return name in _OTHER or _holds_a_function(eqn)


def on_bytes(eqn: Any) -> Any | None:
    """Rewrites an operation on such integers as one on bytes; None for any other.

    Sums, differences and products of bytes, truncated to the last bits, are those of fewer bits.
    """
    if not any(map(_is_of_few_bits, eqn.outvars)):
        return None
    name = eqn.primitive.name
    if name in _OTHER or name in _LOOPS or _holds_a_function(eqn):
        return None
    params = {key: _param_in_bytes(value) for key, value in eqn.params.items()}

    def run(*operands: Any) -> list[Any]:
        if name == "convert_element_type":
            return [_convert(operands[0], str(eqn.outvars[0].aval.dtype))]
        output = eqn.primitive.bind(*operands, **params)
        results = list(output) if eqn.primitive.multiple_results else [output]
        if name in _CLOSED:
            return results
        return [_cut(x, str(v.aval.dtype)) for x, v in zip(results, eqn.outvars, strict=True)]

    struct: Any = jax.ShapeDtypeStruct
    shapes = [struct(v.aval.shape, jnp.dtype(holder(str(v.aval.dtype)))) for v in eqn.invars]
    return jax.make_jaxpr(run)(*shapes)


def _is_of_few_bits(var: Any) -> bool:
    return str(getattr(var.aval, "dtype", "")) in _HELD_IN


def _holds_a_function(eqn: Any) -> bool:
    return any(hasattr(getattr(value, "jaxpr", value), "eqns") for value in eqn.params.values())


def _param_in_bytes(value: Any) -> Any:
    """Replaces a dtype of few bits in a parameter by that of bytes."""
    name = str(value) if isinstance(value, jnp.dtype | type) else ""
    if isinstance(value, type):
        name = str(jnp.dtype(value)) if name else ""
    return jnp.dtype(_HELD_IN[name]) if name in _HELD_IN else value


def _convert(x: Any, dtype: str) -> Any:
    """Rounds floats to the nearest integers, and truncates integers to the last bits."""
    held = jnp.dtype(_HELD_IN[dtype])
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = lax.real(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        low, high = (x.dtype.type(int(limit)) for limit in (limits.min, limits.max))
        return lax.convert_element_type(lax.clamp(low, x, high), held)
    return _cut(lax.convert_element_type(x, held), dtype)


def _cut(x: Any, dtype: str) -> Any:
    if dtype not in _HELD_IN:
        return x
    bits = int(dtype[-1])
    if dtype.startswith("u"):
        return x & x.dtype.type((1 << bits) - 1)
    unused = x.dtype.type(8 - bits)
    return lax.shift_right_arithmetic(lax.shift_left(x, unused), unused)
