"""Host memory in and out of JAX: shared where that is safe, else as a private copy.

JAX takes over aligned NumPy memory without copying it, and copies other memory after its call has
returned. So it never gets memory that others could still write to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper.backends import Exchange
from fmapper_adapters.jax import _private
from fmapper_adapters.jax.arrays.packed import PackedArray, blocks_of

_ALIGNMENT = 64  # bytes; XLA takes over host memory only from such addresses


def refuse(array: Any) -> None:
    """Raises an error for arrays whose values cannot leave JAX.

    Raises:
        TypeError: The array is a tracer, has no values, was deleted, is a PRNG key, or lies partly
            in other processes.
    """
    array = blocks_of(array)
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            "a tracer has no values yet: move arrays before or after jit, grad or vmap, not inside"
        )
    if isinstance(array, jax.ShapeDtypeStruct):
        raise TypeError(
            "a jax.ShapeDtypeStruct has a shape but no values: fill it with fmapper.materialize"
        )
    if array.is_deleted():
        raise TypeError("the array was deleted, probably because it was donated")
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError(
            "a PRNG key has no meaning in another framework: move jax.random.key_data(key), and "
            "restore it with jax.random.wrap_key_data(...); or leave keys in JAX with strict=False"
        )
    if not array.is_fully_addressable:
        raise TypeError("other processes hold parts of this array: gather it first")


def portable(array: Any) -> Any:
    """Returns a PRNG key as its words, and integers of few bits as bytes."""
    from fmapper_adapters.jax.arrays import few_bits

    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return few_bits.in_bytes(array)
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, array)
    return jax.random.key_data(array)


def from_portable(array: Any, old: Any) -> Any:
    """Returns the PRNG keys that have these words; other arrays as they are."""
    from fmapper_adapters.jax._private import key_kind

    if not jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        return array
    return jax.random.wrap_key_data(array, impl=key_kind(old.dtype).name)


def wait_for(arrays: Any) -> Any:
    """Waits for arrays and returns them."""
    jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
    return arrays


def wait_for_each(arrays: Iterable[Any]) -> Iterable[Any]:
    """Waits for arrays, all at once if they are a list; yields those before one that failed."""
    try:
        waited: Iterable[Any] = wait_for(arrays) if isinstance(arrays, list) else ()
    except Exception:  # out of memory, for example, which JAX notices late
        waited = ()
    return waited or map(wait_for, arrays)


def to_numpy(arrays: Sequence[Any], is_remote: bool) -> list[Any]:
    """Returns read-only NumPy arrays; all copies from a device start before the first is done."""
    for array in arrays if is_remote else ():
        array.copy_to_host_async()
    return list(map(np.asarray, arrays))


def put_all(arrays: Sequence[Any], target: Any, committed: Any) -> list[Any]:
    """Puts arrays of NumPy on a device, on a CPU without a copy if they are aligned."""
    dtypes = {array.dtype for array in arrays}
    if target.platform == "cpu" and committed in (None, target) and (
        {*map(type, arrays)} == {np.ndarray}
        and all(jax.dtypes.canonicalize_dtype(dtype) == dtype for dtype in dtypes)
    ):  # fmt: skip
        return _private.put(arrays, target, committed=committed is not None)
    return list(jax.device_put(list(arrays), committed))


def share(array: np.ndarray[Any, Any], target: Any, committed: Any) -> jax.Array:
    """Returns a JAX array on the memory of a NumPy array.

    Raises:
        BufferError: JAX made a copy nevertheless; the message says why.
    """
    if target.platform != "cpu":
        raise BufferError(f"host memory cannot be shared with {target}")
    if not array.size:
        return jnp.asarray(array, device=committed)
    address = array.ctypes.data
    if address % _ALIGNMENT:
        raise BufferError(f"the memory starts at a multiple of {address & -address} bytes, not 64")
    if not array.flags.c_contiguous:
        raise BufferError("JAX can share only memory in C order")
    shared: jax.Array = jax.device_put(array, committed)
    shared.block_until_ready()
    if shared.unsafe_buffer_pointer() != address:
        raise BufferError(f"JAX made a copy of the {array.dtype} array")
    return shared


def take(exchange: Exchange, committed: Any, share: bool) -> Iterator[jax.Array]:
    """Yields arrays from foreign accelerator memory, copied unless it is private.

    The memory may be reused once the last array was yielded.
    """
    views = []  # otherwise memory would be reused while it is read
    for at, data in enumerate(exchange.data):
        view = jax.dlpack.from_dlpack(data)
        views.append(view)
        if share or at in exchange.private:
            yield jax.device_put(view, committed)
        else:
            target = view.sharding if committed is None else committed
            yield wait_for(jax.device_put(view, target, may_alias=False))
    if not share:
        wait_for(views)


def copy(array: Any) -> Any:
    """Copies on the same device; returns when the source has been read."""
    if isinstance(array, PackedArray):
        return array.with_blocks(copy(array.blocks))
    new: jax.Array = jnp.array(array, copy=True)
    return new if isinstance(new, jax.core.Tracer) else new.block_until_ready()


def copy_within_memory(array: jax.Array) -> jax.Array:
    """Copies within a memory other than the default one, where computations put results."""
    new: jax.Array = jax.device_put(array, array.sharding, may_alias=False)
    return new.block_until_ready()


def cast(array: jax.Array, dtype: str) -> jax.Array:
    """Casts an array; on a CPU by NumPy, since XLA flushes subnormals to zero there."""
    target = jnp.dtype(dtype)
    floats = jnp.issubdtype(array.dtype, jnp.inexact) and jnp.issubdtype(target, jnp.inexact)
    devices = array.devices()
    if not floats or len(devices) > 1 or next(iter(devices)).platform != "cpu":
        return array.astype(target)
    host = np.asarray(array)
    if host.dtype.itemsize == target.itemsize == 1:  # ml_dtypes has no direct cast
        host = host.astype(np.float32)
    raw = np.empty(host.size * target.itemsize + _ALIGNMENT, np.uint8)
    made = np.ndarray(host.shape, target, raw, -raw.ctypes.data % _ALIGNMENT)
    with np.errstate(all="ignore"):
        np.copyto(made, host, casting="unsafe")
    new: jax.Array = jax.device_put(made, array.sharding if array.committed else None)
    return new


def has_survived(old: jax.Array, new: jax.Array) -> bool:
    """Returns whether a cast has kept every integer and made no finite value infinite."""
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return bool((new.astype(old.dtype) == old).all())
    if jnp.issubdtype(old.dtype, jnp.integer):
        real = new.real if jnp.iscomplexobj(new) else new
        limit = float(int(jnp.iinfo(old.dtype).max) + 1)  # type: ignore[no-untyped-call]
        largest = float(jnp.finfo(real.dtype).max)  # type: ignore[no-untyped-call]
        is_small = real < limit if limit <= largest else jnp.isfinite(real)
        return bool((is_small & (real.astype(old.dtype) == old)).all())
    if jnp.iscomplexobj(old) and not jnp.iscomplexobj(new):
        return not bool(old.imag.any()) and has_survived(old.real, new)
    if jnp.issubdtype(new.dtype, jnp.complexfloating):
        return has_survived(old.real, new.real) and has_survived(old.imag, new.imag)
    return not bool((~jnp.isfinite(new) & jnp.isfinite(old)).any())


def in_large_pages(made: Mapping[str, Callable[[], jax.Array]]) -> dict[str, jax.Array]:
    """Computes CPU arrays one after the other, and puts them into one block of memory.

    NumPy asks Linux for large pages for such a block, which JAX does not do. With pages of 4 KiB, a
    processor looks up so many addresses that it reads weights at two thirds of the rate.
    """
    shapes = {name: jax.eval_shape(make) for name, make in made.items()}
    sizes = {name: -(-x.size * x.dtype.itemsize // _ALIGNMENT) for name, x in shapes.items()}
    block = np.empty((sum(sizes.values()) + 1) * _ALIGNMENT, np.uint8)
    start, arrays = -block.ctypes.data % _ALIGNMENT, {}
    for name, make in made.items():
        new = make()
        place = np.ndarray(new.shape, new.dtype, block, start)
        np.copyto(place, new)
        with jax.default_device(next(iter(new.devices()))):  # JAX shares memory with it alone
            arrays[name] = jax.device_put(place, new.sharding if new.committed else None)
        start += sizes[name] * _ALIGNMENT
    return arrays
