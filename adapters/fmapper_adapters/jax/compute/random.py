"""Kernels of `fmapper.random` for JAX, by `jax.random`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_P = ParamSpec("_P")
_R = TypeVar("_R")
_config: Any = jax.config

HOST = False


def raw(key: Any) -> Any:
    """Returns the words of a threefry key, raw or typed; None for anything else."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        good = key.shape == () and jax.random.key_impl(key) == "threefry2x32"
        return jax.random.key_data(key) if good else None
    return key if key.shape == (2,) and key.dtype == np.uint32 else None


def lacks(dtype: str) -> str | None:
    """Explains why JAX cannot draw numbers of a dtype; None if it can."""
    if not dtype.endswith("64") or jax.dtypes.canonicalize_dtype(dtype) == dtype:
        return None
    return (
        f"JAX has no {dtype} while jax_enable_x64 is off. Ask for dtype={dtype[:-2] + '32'!r}, or "
        "call jax.config.update('jax_enable_x64', True) first."
    )


def on_host(key: Any, dtype: str) -> bool:
    """Returns False: JAX draws on its own devices."""
    return False


def to_host(key: Any) -> np.ndarray[Any, Any]:
    """Returns the words as a NumPy array.

    Raises:
        TypeError: The key is traced, and has no values yet.
    """
    if isinstance(key, jax.core.Tracer):
        raise TypeError("a key traced by jax cannot be passed to another backend")
    return np.asarray(key)


def put(array: Any, like: Any) -> Any:
    """Moves a NumPy or JAX array to the device of `like`."""
    if like is None or isinstance(like, jax.core.Tracer | jax.ShapeDtypeStruct):
        return jnp.asarray(array)
    devices = like.devices()
    if isinstance(array, jax.core.Tracer) or (
        isinstance(array, jax.Array) and array.devices() == devices
    ):
        return array
    if len(devices) > 1 or not like.committed:  # sharded or uncommitted: JAX chooses
        return jnp.asarray(array)
    return jax.device_put(array, next(iter(devices)))


def _fix_counters() -> AbstractContextManager[object]:
    """Fixes how counters map to elements, which must be the same on every backend."""
    if _config.jax_threefry_partitionable:
        return nullcontext()
    context: AbstractContextManager[object] = jax.threefry_partitionable(True)
    return context


def _partitionable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    @wraps(function)
    def call_partitionable(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _fix_counters():
            return function(*args, **kwargs)

    return call_partitionable


def _typed_key(key: Any) -> Any:
    return jax.random.wrap_key_data(key, impl="threefry2x32")


@_partitionable
def split(key: Any, shape: Sequence[int]) -> Any:
    """Calls `jax.random.split`."""
    return jax.random.key_data(jax.random.split(_typed_key(key), tuple(shape)))


@_partitionable
def fold_in(key: Any, data: Any) -> Any:
    """Calls `jax.random.fold_in`."""
    word = data & 0xFFFFFFFF if isinstance(data, int) else data
    return jax.random.key_data(jax.random.fold_in(_typed_key(key), jnp.asarray(word, jnp.uint32)))


@_partitionable
def bits(key: Any, width: int, shape: Sequence[int]) -> Any:
    """Calls `jax.random.bits`."""
    return jax.random.bits(_typed_key(key), tuple(shape), f"uint{width}")


@_partitionable
def uniform(key: Any, shape: Sequence[int], dtype: str, low: Any, high: Any) -> Any:
    """Calls `jax.random.uniform`."""
    return jax.random.uniform(_typed_key(key), tuple(shape), dtype, low, high)


@_partitionable
def normal(key: Any, shape: Sequence[int], dtype: str) -> Any:
    """Calls `jax.random.normal`."""
    return jax.random.normal(_typed_key(key), tuple(shape), dtype)


@_partitionable
def truncated_normal(key: Any, lower: float, upper: float, shape: Sequence[int], dtype: str) -> Any:
    """Calls `jax.random.truncated_normal`."""
    return jax.random.truncated_normal(_typed_key(key), lower, upper, tuple(shape), dtype)


@_partitionable
def bernoulli(key: Any, p: Any, shape: Sequence[int] | None) -> Any:
    """Calls `jax.random.bernoulli`, with p in float32 regardless of jax_enable_x64."""
    p = jnp.asarray(p, jnp.float32)
    return jax.random.bernoulli(_typed_key(key), p, None if shape is None else tuple(shape))


@_partitionable
def randint(key: Any, shape: Sequence[int], low: Any, high: Any, dtype: str) -> Any:
    """Calls `jax.random.randint`."""
    return jax.random.randint(_typed_key(key), tuple(shape), low, high, dtype)


@_partitionable
def permutation(key: Any, x: Any, axis: int, independent: bool) -> Any:
    """Calls `jax.random.permutation`; a range is of int32 regardless of jax_enable_x64."""
    values = jnp.arange(x, dtype=jnp.int32) if isinstance(x, int) else x
    return jax.random.permutation(_typed_key(key), values, axis, independent=independent)


def scale(x: Any, factor: float) -> Any:
    """Returns the product in the dtype of the array."""
    return x * jnp.asarray(factor, x.dtype)
