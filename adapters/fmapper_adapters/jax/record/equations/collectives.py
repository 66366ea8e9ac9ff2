"""Sums over a named axis of `vmap`: in a jaxpr they are sums over dimensions."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def on_dimensions(eqn: Any) -> Any | None:
    """Rewrites a collective over named dimensions as reductions; None for anything else.

    `jax.vmap(f, axis_name="batch")` leaves `psum[axes=(0,)]` behind where an operand is batched.
    """
    kind = _reduction(eqn.primitive.name)
    axes = eqn.params.get("axes", ())
    if kind is None or not axes or not all(isinstance(axis, int) for axis in axes):
        return None
    if eqn.params.get("axis_index_groups") is not None:
        return None

    def reductions(*operands: Any) -> list[Any]:
        return [
            lax.reduce(x, _start(kind, x.dtype), kind, tuple(a % x.ndim for a in axes))
            for x in operands
        ]

    struct: Any = jax.ShapeDtypeStruct
    return jax.make_jaxpr(reductions)(*[struct(v.aval.shape, v.aval.dtype) for v in eqn.invars])


def _reduction(name: str) -> Any | None:
    return {"psum": lax.add, "pmax": lax.max, "pmin": lax.min}.get(name)


def _start(kind: Any, dtype: Any) -> Any:
    """Returns the identity element of a reduction."""
    if kind is lax.add:
        return dtype.type(0)
    limits = jax.numpy.finfo if jax.numpy.issubdtype(dtype, jax.numpy.floating) else jax.numpy.iinfo
    if limits is jax.numpy.finfo:
        return dtype.type(-float("inf") if kind is lax.max else float("inf"))
    info = limits(dtype)
    return dtype.type(info.min if kind is lax.max else info.max)
