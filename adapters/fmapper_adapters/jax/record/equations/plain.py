"""Equations as plain data: dtypes and shapes, numbers, source lines."""

from __future__ import annotations

from typing import Any

import numpy as np

from fmapper_adapters.jax.arrays import few_bits, prng_keys
from fmapper_adapters.jax.record import frames


def has_derivatives(kind: tuple[str, Any]) -> bool:
    """Returns whether arrays of a kind may have derivatives."""
    return kind[0].startswith(("float", "bfloat", "complex"))


def number(value: Any) -> Any:
    """Returns an array of one element as a Python number."""
    array = np.asarray(few_bits.in_bytes(value)) if hasattr(value, "dtype") else np.asarray(value)
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat", "float8")):
        array = array.astype(np.float64)
    return array.item()


def kind(aval: Any) -> tuple[str, tuple[int | str, ...]]:
    """Returns dtype and shape; keys of threefry are two words of 32 bits, in a last dimension."""
    dtype, shape = prng_keys.physical(aval)
    return dtype, tuple(n if isinstance(n, int) else str(n) for n in shape)


def path(eqn: Any, outer: str) -> str:
    """Returns the names of the scopes around an equation; Flax names modules by them."""
    scopes = str(eqn.source_info.name_stack)
    return "/".join(part for part in (outer, scopes) if part)


def source(eqn: Any, within: tuple[str, int, int, str] | None = None) -> str:
    """Returns the innermost source line outside of JAX and Flax, else the innermost one.

    Args:
        eqn: The equation.
        within: A file, a range of its lines, and a function there. Lines of that function are
            preferred, then lines in the range.
    """
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ""
    if within is not None:
        file, first, last, name = within
        inside = [
            frame
            for frame in traceback.frames
            if frame.file_name == file and first <= frame.line_num <= last
        ]
        chosen = [frame for frame in inside if frame.function_name.rpartition(".")[2] == name]
        for frame in chosen or inside:
            return f"{file}:{frame.line_num}"
    lines = [f for f in traceback.frames if not frames.is_of_jax(f.file_name)]
    if within is not None:
        return f"{lines[0].file_name}:{lines[0].line_num}" if lines else ""
    chosen = [f for f in lines if not frames.is_of_library(f.file_name)] or lines
    return f"{chosen[0].file_name}:{chosen[0].line_num}" if chosen else ""
