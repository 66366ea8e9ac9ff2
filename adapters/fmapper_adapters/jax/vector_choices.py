"""Chooses other valid vectors in factorisations, to find the outputs that depend on the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from fmapper_adapters.jax.record.equations import custom_derivatives

# The dimension of each result that counts vectors; None for results without vectors.
_VECTORS: dict[str, tuple[int | None, ...]] = {
    "eigh": (-1, None),
    "svd": (None, -1, -2),
    "qr": (-1, -2, None),
}


def turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Rewrites a function so that eigenvectors and singular vectors have other signs.

    Complex vectors get another phase. The results are as valid as before.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        outputs = _evaluate(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr = getattr(closed, "jaxpr", closed)
    env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    env.update(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))

    def value(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else env[var]

    for eqn in jaxpr.eqns:
        results = _results(eqn, [value(var) for var in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [value(var) for var in jaxpr.outvars]


def _results(eqn: Any, args: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"):
        return _evaluate(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), args)
    params = {key: _turn_inside(value) for key, value in eqn.params.items()}
    results = custom_derivatives.results_of(eqn.replace(params=params))(args)
    if name == "eig":  # the values, then one or two sides
        return [results[0], *(_turn_vectors(x, -1, 3 * i) for i, x in enumerate(results[1:]))]
    dimensions = _VECTORS.get(name, ())
    if len(results) == 1:
        return results
    return [
        x if dimension is None else _turn_vectors(x, dimension, 0)
        for x, dimension in zip(results, (*dimensions, *(None,) * len(results)), strict=False)
    ]


def _turn_inside(value: Any) -> Any:
    """Changes signs of vectors in the body of a loop or branch."""
    if isinstance(value, core.ClosedJaxpr):
        struct: Any = jax.ShapeDtypeStruct
        shapes = [struct(v.aval.shape, v.aval.dtype) for v in value.jaxpr.invars]
        return jax.make_jaxpr(lambda *args: _evaluate(value, args))(*shapes)
    if isinstance(value, tuple) and value and isinstance(value[0], core.ClosedJaxpr):
        return tuple(map(_turn_inside, value))
    return value


def _turn_vectors(x: Any, dimension: int, start: int) -> Any:
    """Multiplies vectors by irregular signs or phases."""
    number = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + dimension) + start
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        angle = (1.0 + number * 0.7).astype(x.real.dtype)
        phase = jax.lax.complex(jnp.cos(angle), jnp.sin(angle)).astype(x.dtype)
        return x * (phase if dimension == -1 else jnp.conj(phase))
    return jnp.where(number * 7 % 5 < 2, -x, x)
