"""Dtypes by name, as NumPy and ml_dtypes have them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(256)
def numpy_dtype(name: str) -> Any:
    """Returns the little-endian NumPy dtype of a name such as `bfloat16`."""
    import numpy as np

    if name.startswith(("bfloat", "float8", "float4", "int4", "uint4", "int2", "uint2")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name).newbyteorder("<")


@lru_cache(256)
def name_of_dtype(dtype: Any) -> str:
    """Returns the name of a NumPy dtype, which takes NumPy longer than all else about an array."""
    name: str = dtype.name
    return name
