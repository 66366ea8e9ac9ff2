"""Computes in double precision whatever dtypes a model asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax import _private

_NARROW = frozenset({"float32", "float16", "bfloat16"})
_WIDER = {"complex64": jnp.dtype("complex128")} | dict.fromkeys(_NARROW, jnp.dtype("float64"))

# A part of the key of `jax.jit`'s cache, so that traces within a block are not used after it.
_PATCHED: Any = jax.make_user_context(default_value=None)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def traced_apart(*reason: Any) -> Iterator[None]:
    """Keeps functions that are traced within the block apart from those outside of it."""
    with _PATCHED(reason):
        yield


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Has JAX compute in double precision within the block, and widens casts to less than that."""

    def widen(dtype: Any) -> Any:
        return _WIDER.get(str(dtype), dtype)

    with jax.enable_x64(True), traced_apart("double"), _private.change_casts(widen):
        yield


def dtypes_in(jaxpr: Any) -> frozenset[str]:
    """Returns the floating dtypes of everything that a jaxpr computes."""
    dtypes: set[str] = set()
    todo = [jaxpr]
    while todo:
        item = todo.pop()
        if hasattr(item, "jaxpr"):
            todo.append(item.jaxpr)
            continue
        for equation in getattr(item, "eqns", ()):
            dtypes |= {str(getattr(v.aval, "dtype", "")) for v in equation.outvars}
            for value in equation.params.values():
                several = value if isinstance(value, tuple | list) else (value,)
                todo += [x for x in several if hasattr(x, "jaxpr") or hasattr(x, "eqns")]
    return frozenset(dtypes & {*_WIDER, "float64", "complex128"})
