"""Dtypes by name: those of arrays in files, to which movers can cast, and NumPy's."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
"""The dtypes of checkpoints: fmapper's name -> the name in safetensors."""

STORED_DTYPES = frozenset(DTYPES) | {"complex128"}
"""The dtypes of formats other than safetensors, which lacks complex128."""


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
    """Returns the name of a NumPy dtype; cached, because NumPy is slow to compute it."""
    name: str = dtype.name
    return name


def itemsize(dtype: str) -> int:
    """Returns the bytes of one element; 0 for a dtype without numbers, such as PRNG keys.

    Examples:
        >>> itemsize("bfloat16"), itemsize("float8_e4m3fn"), itemsize("bool"), itemsize("key<fry>")
        (2, 1, 1, 0)
    """
    if dtype == "bool":
        return 1
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return math.ceil(int(bits[1]) / 8) if bits else 0
