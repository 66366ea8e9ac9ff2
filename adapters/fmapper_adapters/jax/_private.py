"""All private names of JAX that fmapper uses, where no public one exists.

They are known to work in JAX 0.10 to 0.12; `tests/house/test_private_apis.py` tests the behaviour
that fmapper relies on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax._src import config, core, distributed, dtypes, random, xla_bridge
from jax._src.lax import lax
from jaxlib import xla_client


def has_started() -> bool:
    """Returns whether JAX has initialised its devices, and so reserved their memory."""
    return bool(xla_bridge.backends_are_initialized())


def coordinator() -> Any:
    """Returns this process's connection to the coordinator of `jax.distributed`."""
    return distributed.global_state.client


def wait_for_message(client: Any, key: str, milliseconds: int) -> bytes:
    """Returns the value of a key of the coordinator, and waits until it is set."""
    while True:
        try:
            return bytes(client.blocking_key_value_get_bytes(key, milliseconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def put(arrays: Iterable[Any], device: Any, *, committed: bool) -> list[jax.Array]:
    """Does for NumPy arrays of JAX's dtypes what `jax.device_put` does in ten times the time."""
    sharding, put_one = jax.sharding.SingleDeviceSharding(device), xla_client.batched_device_put
    with config.explicit_device_put_scope():
        return [
            put_one(_outline(array.shape, array.dtype), sharding, [array], [device], committed)
            for array in arrays
        ]


@functools.lru_cache(1024)
def _outline(shape: tuple[int, ...], dtype: Any) -> Any:
    return core.ShapedArray(shape, dtype)


def key_kind(dtype: Any) -> Any:
    """Returns the generator of a dtype of PRNG keys, which has a `name` and a `key_shape`."""
    return dtype._impl


def size_of_axis(name: Any) -> Any:
    """Returns the size of an axis that `vmap` names, which may be a symbol."""
    sizes: Any = core.get_axis_env
    return sizes().axis_size(name)


@contextlib.contextmanager
def change_casts(change: Callable[[Any], Any]) -> Iterator[None]:
    """Changes the dtypes that casts produce within the block, except inside `jax.random`.

    Functions of `jax.random` combine their results with constants of the requested dtype. Linen
    calls them for the shapes of its parameters.

    Args:
        change: Maps a requested dtype to the one to cast to.
    """
    original = lax._convert_element_type
    drawing = 0

    def cast(operand: Any, new_dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_known = new_dtype is not None and not dtypes.issubdtype(new_dtype, dtypes.extended)
        if is_known and not drawing:
            new_dtype = change(dtypes.dtype(new_dtype))
        return original(operand, new_dtype, *args, **kwargs)

    def draw_with(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def draw(*args: Any, **kwargs: Any) -> Any:
            nonlocal drawing
            drawing += 1
            try:
                return function(*args, **kwargs)
            finally:
                drawing -= 1

        return draw

    modules = (jax.random, random)
    before: list[tuple[Any, str, Any]] = [
        (module, name, function)
        for module in modules
        for name, function in vars(jax.random).items()
        if callable(function) and vars(random).get(name) is function
    ]
    lax._convert_element_type = cast
    for module, name, function in before:
        setattr(module, name, draw_with(function))
    try:
        yield
    finally:
        lax._convert_element_type = original
        for module, name, function in before:
            setattr(module, name, function)
