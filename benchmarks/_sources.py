"""The arrays that `leaves.py` converts. A framework is imported when an array of it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

Tree = dict[str, Any]
Shape = tuple[int, ...]

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
VOCABULARY: Final = 50_257
POSITIONS: Final = 1_024
LAYERS: Final = 24


def make(backend: str, shape: Shape, dtype: str = "float32", value: float = 1.0) -> Any:
    """Make an array with memory of its own, every page of it touched."""
    if backend == "numpy":
        return np.full(shape, value, numpy_dtype(dtype))
    if backend == "torch":
        import torch

        return torch.full(shape, value, dtype=getattr(torch, dtype))
    if backend == "jax":
        import jax.numpy as jnp

        return jnp.full(shape, value, dtype).block_until_ready()
    raise ValueError(f"no arrays of {backend!r} here")


def make_tree(backend: str, shapes: Iterable[Shape], dtype: str = "float32") -> Tree:
    """Make a flat dict of distinct arrays."""
    return {
        f"leaf{i}": make(backend, shape, dtype, value=1 + i % 100) for i, shape in enumerate(shapes)
    }


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return a NumPy dtype; bfloat16 comes from ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def address(array: Any) -> int:
    """Return where the data of an array begins."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    found = array.data_ptr() if hasattr(array, "data_ptr") else array.unsafe_buffer_pointer()
    return int(found)


def gpt2_shapes(size: int) -> list[Shape]:
    """Return the 292 shapes of GPT-2 medium, its width chosen so that float32 takes `size` bytes.

    Attention and MLP as in the original (`c_attn`, `c_proj`, `c_fc`), the head tied to `wte`.
    """
    a, b = 12 * LAYERS, VOCABULARY + POSITIONS + 13 * LAYERS + 2  # a d^2 + b d parameters
    d = max(1, round((math.sqrt(b * b + a * size) - b) / (2 * a)))  # 4 a d^2 + 4 b d = size
    norm: list[Shape] = [(d,), (d,)]
    block: list[Shape] = [
        *norm,
        *((d, 3 * d), (3 * d,), (d, d), (d,)),
        *norm,
        *((d, 4 * d), (4 * d,), (4 * d, d), (d,)),
    ]
    return [(VOCABULARY, d), (POSITIONS, d), *block * LAYERS, *norm]
