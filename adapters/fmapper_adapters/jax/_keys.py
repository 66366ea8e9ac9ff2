"""Random keys in programs: outside of JAX they are arrays of 32-bit words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The operations that know what a key is; all others only move keys about.
_OWN = {"random_seed", "random_bits", "random_split", "random_fold_in", "random_wrap"}
_OWN |= {"random_unwrap", "random_clone", "random_gamma"}
_WITH_GRAPHS = {"scan", "while", "cond", "custom_jvp_call", "custom_vjp_call"}


def is_key(aval: Any) -> bool:
    """Whether an abstract value is an array of keys."""
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def physical(aval: Any) -> tuple[str, tuple[Any, ...]]:
    """The dtype and the shape of the array that stands for an abstract value."""
    if not hasattr(aval, "dtype"):
        return type(aval).__name__, ()
    if is_key(aval):
        return "uint32", (*aval.shape, *aval.dtype._impl.key_shape)
    return str(aval.dtype), tuple(aval.shape)


def params(eqn: Any) -> dict[str, Any]:
    """The generator of an operation on keys, by name, and how JAX numbers its blocks."""
    if eqn.primitive.name not in _OWN:
        return {}
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    impl = next(aval.dtype._impl for aval in avals if is_key(aval))
    config: Any = jax.config
    return {"impl": impl.name, "partitionable": bool(config.jax_threefry_partitionable)}


def on_raw_keys(eqn: Any) -> Any | None:
    """An operation that moves keys about, as one on their words; None if it is no such thing."""
    keyed = [is_key(v.aval) if hasattr(v.aval, "dtype") else False for v in eqn.invars]
    results = [is_key(v.aval) if hasattr(v.aval, "dtype") else False for v in eqn.outvars]
    name = eqn.primitive.name
    if name in _OWN or name in _WITH_GRAPHS or not (any(keyed) or any(results)):
        return None
    words = next(
        v.aval.dtype._impl.key_shape for v in (*eqn.invars, *eqn.outvars) if is_key(v.aval)
    )

    def operation(*args: Any) -> Any:
        return eqn.primitive.bind(*args, **eqn.params)

    axes = [-1 if one else None for one in keyed]
    for _ in words:
        operation = jax.vmap(operation, in_axes=tuple(axes), out_axes=-1)
    shapes = [
        jax.core.ShapedArray(shape, np.dtype(dtype))
        for dtype, shape in (physical(v.aval) for v in eqn.invars)
    ]
    return jax.make_jaxpr(operation)(*shapes)
