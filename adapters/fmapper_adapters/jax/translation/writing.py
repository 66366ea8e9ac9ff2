"""The common code of dialects for JAX and libraries built on it."""

from __future__ import annotations

import ast
import base64
import math
import operator
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ConversionError
from fmapper.programs import Call
from fmapper.translation import Embedded, Helper, expr
from fmapper_adapters.jax.aten import table as lowerings
from fmapper_adapters.jax.translation import table

_PLACES = {
    "jnp": jnp,
    "jax.lax": jax.lax,
    "jax.nn": jax.nn,
    "jax.scipy.special": jax.scipy.special,
    "jnp.linalg": jnp.linalg,
    "jax.lax.linalg": jax.lax.linalg,
    "jnp.fft": jnp.fft,
    "math": math,
    "operator": operator,
    "np": np,
}
_OVERRIDES = {
    "default_dtype": 'def _default_dtype():\n    return np.dtype("float32")',
}


class JaxPrinters:
    """Operations of ATen in code for JAX, and the helpers that this code calls."""

    def __init__(self) -> None:
        self._table = table.load()
        self._embedded = Embedded(_PLACES, _OVERRIDES)

    def printer(self, op: str) -> Any:
        """Returns the printer of an operation."""
        return self._table.find(op)

    def helper(self, name: str) -> Helper | None:
        """Returns a function that code may call by its name."""
        if name in self._embedded.helpers:
            return self._embedded.helpers[name]
        source = table.helpers().get(name)
        return None if source is None else Helper(source)

    def imports(self) -> Mapping[str, str]:
        """Returns the imports of the lowerings that were written."""
        return self._embedded.imports

    def reserved_names(self) -> frozenset[str]:
        """Returns the names of the helpers that printed code calls."""
        return frozenset(table.helpers())

    def fallback(self, call: Call) -> str:
        """Returns the name of the helper that lowers a call.

        Raises:
            ConversionError: There is none, it draws random numbers, or it cannot be written.
        """
        lowering = lowerings.find(call.op, {})
        if lowering is None:
            raise ConversionError(f"{call.op} has no lowering to JAX")
        if lowering.random is True:
            raise ConversionError(f"{call.module}: {call.op} draws random numbers ({call.source})")
        return self._embedded.add(lowering.function)

    def dtype(self, name: str) -> ast.expr:
        """Returns the code for a dtype."""
        return table.dtype_code(name)

    def pack(self, values: Any) -> ast.expr:
        """Returns the code for an array by its bytes."""
        data = base64.b85encode(zlib.compress(values.tobytes(), 9)).decode()
        raw = expr(
            "np.frombuffer(zlib.decompress(base64.b85decode({0})), {1})", data, values.dtype.name
        )
        return expr("jnp.array({0}.reshape({1}))", raw, tuple(int(s) for s in values.shape))
