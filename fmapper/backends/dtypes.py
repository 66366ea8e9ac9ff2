"""Dtypes by name: which of them movers cast, and to which dtype."""

from __future__ import annotations

import functools
import re
from typing import Any

from fmapper.files.dtypes import DTYPES

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FLOAT8 = tuple(name for name in DTYPES if name.startswith("float8_"))
_COMPLEX_OF = {"float64": "complex128"}
_FLOAT_OF = {"complex128": "float64", "complex64": "float32"}


def dtype_name(dtype: Any) -> str:
    """Returns the name of a floating or complex dtype, given by name or as a framework's object.

    Raises:
        ValueError: It is not such a dtype.

    Examples:
        >>> import numpy as np
        >>> dtype_name("bfloat16"), dtype_name(np.float16), dtype_name(np.dtype("complex64"))
        ('bfloat16', 'float16', 'complex64')
    """
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = dtype.__name__
    else:
        inner = getattr(dtype, "dtype", dtype)
        name = bare_name(inner)
    if name not in (*_FLOATS, *_FLOAT8, *_FLOAT_OF):
        names = (*_FLOATS, *_FLOAT8, *_FLOAT_OF)
        hint = ""
        if re.fullmatch(r"u?int\d+|bool", name):
            hint = "Cast integers yourself: fmap(lambda x: x.astype(...), tree). "
        raise ValueError(
            f"dtype={dtype!r} is not a floating or complex dtype, and movers cast only to those. "
            f"{hint}Write one of: {', '.join(names)}."
        )
    return name


def bare_name(dtype: Any) -> str:
    """Returns the name of a framework's own dtype object, without that of its module."""
    name: str = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    return name


@functools.cache
def is_inexact(dtype: str) -> bool:
    """Returns whether a dtype is floating or complex."""
    return dtype.startswith(("float", "bfloat", "complex"))


def wanted_dtype(dtype: str, asked: str | None) -> str:
    """Returns the dtype of a leaf of `dtype` after a cast to `asked`.

    Integers and bools keep theirs. Complex leaves take the complex dtype of the asked precision,
    complex64 at the least, floating leaves the floating one.
    """
    if asked is None or not is_inexact(dtype):
        return dtype
    if dtype.startswith("complex"):
        return asked if asked.startswith("complex") else _COMPLEX_OF.get(asked, "complex64")
    return _FLOAT_OF.get(asked, asked)
