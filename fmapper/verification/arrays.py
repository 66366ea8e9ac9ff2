"""Arrays of any framework as NumPy arrays: their precision, and perturbation by roundings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmapper.backends.discovery import adapter_of

# The distance from 1 to the next number, by dtype.
UNITS: Mapping[str, float] = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
HALVES = frozenset({"float16", "bfloat16"})
_WIDER = {"float32": "float64", "complex64": "complex128", "float16": "float64",
          "bfloat16": "float64"}  # fmt: skip


def to_host(array: Any) -> Any:
    """Converts an array or number to a NumPy array; a key to its words."""
    import numpy as np

    from fmapper.moves.mover import to_numpy

    adapter = adapter_of(array)
    if adapter is None:
        return np.asarray(array)
    return to_numpy(adapter.portable(array), copy=None)


def dtype_of(array: Any) -> str:
    """Returns the name of the dtype of an array."""
    return str(getattr(array, "dtype", "")).rpartition(".")[2]


def is_floating(array: Any) -> bool:
    """Returns whether an array holds floating or complex numbers."""
    return dtype_of(array) in UNITS


def widen(array: Any) -> Any:
    """Converts a floating NumPy array to double precision; others stay as they are."""
    wider = _WIDER.get(dtype_of(array))
    return array if wider is None else array.astype(wider)


def move(array: Any, off: float, seed: int | None = None) -> Any:
    """Moves the elements of a floating NumPy array by a share of themselves.

    Args:
        array: The array.
        off: The largest relative change.
        seed: For random shares; None for `cos(0), cos(1), ...` times `off`.
    """
    import numpy as np

    if not off or not is_floating(array):
        return array
    if seed is None:
        shares = np.cos(np.arange(array.size)).reshape(array.shape)
    else:
        generator = np.random.default_rng([seed, array.size])
        shares = generator.uniform(-1, 1, array.shape)
    return (widen(array) * (1 + off * shares)).astype(array.dtype)


def largest(array: Any) -> float:
    """Returns the largest finite absolute value."""
    import numpy as np

    values = np.abs(widen(array))
    return float(values[np.isfinite(values)].max(initial=0.0))
