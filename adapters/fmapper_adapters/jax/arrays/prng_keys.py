"""Random keys in programs, which are arrays of 32-bit words outside of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax import _private
from fmapper_adapters.jax.arrays import few_bits

# The operations that draw from keys; all others only move keys around.
_DRAWN = {"random_seed", "random_bits", "random_split", "random_fold_in"}
_WITH_GRAPHS = {"scan", "while", "cond", "custom_jvp_call", "custom_vjp_call"}
# Conversions between keys and their words, which are the same in a program.
_IDENTITIES = {"random_wrap", "random_unwrap", "random_clone"}
_THREEFRY = "threefry2x32"


def is_key(aval: Any) -> bool:
    """Returns whether an abstract value is an array of keys."""
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def is_identity(eqn: Any) -> bool:
    """Returns whether an operation leaves the words of a key as they are."""
    return eqn.primitive.name in _IDENTITIES


def physical(aval: Any) -> tuple[str, tuple[Any, ...]]:
    """Returns dtype and shape of the physical array of an abstract value."""
    if not hasattr(aval, "dtype"):
        return type(aval).__name__, ()
    if is_key(aval):
        return "uint32", (*aval.shape, *_private.key_kind(aval.dtype).key_shape)
    return few_bits.holder(str(aval.dtype)), tuple(aval.shape)


def params(eqn: Any) -> dict[str, Any]:
    """Returns the generator and whether its counters are partitionable; {} for other operations."""
    if eqn.primitive.name not in _DRAWN:
        return {}
    config: Any = jax.config
    return {"impl": _THREEFRY, "partitionable": bool(config.jax_threefry_partitionable)}


def on_raw_keys(eqn: Any) -> Any | None:
    """Rewrites an operation on keys as one on their words; None if it needs no change.

    Operations that move keys around move their words. Generators other than threefry2x32 are
    expanded into the operations that JAX implements them with.
    """
    keyed = [is_key(v.aval) if hasattr(v.aval, "dtype") else False for v in eqn.invars]
    results = [is_key(v.aval) if hasattr(v.aval, "dtype") else False for v in eqn.outvars]
    name = eqn.primitive.name
    if name in _WITH_GRAPHS or not (any(keyed) or any(results)):
        return None
    kind = next(
        _private.key_kind(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars) if is_key(v.aval)
    )
    if name in _DRAWN:
        if kind.name == _THREEFRY:
            return None
        operation = _draw(eqn, kind)
    else:
        operation = _move(eqn, keyed, kind)
    shapes = [
        jax.core.ShapedArray(shape, np.dtype(dtype))
        for dtype, shape in (physical(v.aval) for v in eqn.invars)
    ]
    return jax.make_jaxpr(operation)(*shapes)


def _move(eqn: Any, keyed: list[bool], kind: Any) -> Callable[..., Any]:
    def operation(*args: Any) -> Any:
        return eqn.primitive.bind(*args, **eqn.params)

    axes = tuple(-1 if is_key else None for is_key in keyed)
    for _ in kind.key_shape:
        operation = jax.vmap(operation, in_axes=axes, out_axes=-1)
    return operation


def _draw(eqn: Any, kind: Any) -> Callable[..., Any]:
    """Applies a generator to each key of an array."""
    given = eqn.params
    draw: Callable[..., Any]
    match eqn.primitive.name:
        case "random_seed":
            draw = kind.seed
        case "random_split":
            draw = lambda key: kind.split(key, given["shape"])  # noqa: E731
        case "random_bits":
            draw = lambda key: kind.random_bits(key, given["bit_width"], given["shape"])  # noqa: E731
        case _:
            return _fold(eqn, kind)
    for _ in range(eqn.invars[0].aval.ndim):
        draw = jax.vmap(draw)
    return draw


def _fold(eqn: Any, kind: Any) -> Callable[..., Any]:
    shape = eqn.outvars[0].aval.shape
    fold: Callable[..., Any] = kind.fold_in
    for _ in shape:
        fold = jax.vmap(fold)

    def all_of_them(keys: Any, numbers: Any) -> Any:
        words = jnp.broadcast_to(keys, (*shape, *kind.key_shape))
        return fold(words, jnp.broadcast_to(numbers, shape))

    return all_of_them
