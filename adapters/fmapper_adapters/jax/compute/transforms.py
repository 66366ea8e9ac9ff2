"""Gradients, batches and compiled programs of functions of JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

Calls = Callable[[Sequence[Any]], "tuple[Any, list[Any]]"]


def value_and_grad(run: Calls, arrays: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
    """Calls `jax.value_and_grad`; conjugates gradients by complex arrays, as in torch."""
    (value, further), gradients = jax.value_and_grad(run, has_aux=True)(list(arrays))
    return value, further, [jnp.conj(g) if jnp.iscomplexobj(g) else g for g in gradients]


def vectorize(
    run: Callable[[Sequence[Any]], list[Any]], arrays: Sequence[Any], axes: Sequence[int | None]
) -> list[Any]:
    """Calls `jax.vmap`."""
    results: list[Any] = jax.vmap(run, in_axes=(list(axes),))(list(arrays))
    return results


class _Rest:
    """The structure of results, compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value


@tree_util.register_pytree_node_class
class _Results:
    """Results on their way out of a compiled program, which keeps the rest."""

    def __init__(self, arrays: Sequence[Any], rest: _Rest) -> None:
        self.arrays, self.rest = arrays, rest

    def tree_flatten(self) -> tuple[Sequence[Any], _Rest]:
        """Implements JAX's pytree protocol."""
        return self.arrays, self.rest

    @classmethod
    def tree_unflatten(cls, rest: _Rest, arrays: Sequence[Any]) -> _Results:
        """Implements JAX's pytree protocol."""
        return cls(arrays, rest)


def compile(
    run: Callable[[Sequence[Any], Any], tuple[list[Any], Any]],
) -> Callable[[list[Any], Any], tuple[Sequence[Any], Any]]:
    """Calls `jax.jit`, with the key as a static argument."""

    def trace(arrays: list[Any], key: Any) -> _Results:
        results, rest = run(arrays, key)
        return _Results(results, _Rest(rest))

    program = jax.jit(trace, static_argnums=1)

    def call(arrays: list[Any], key: Any) -> tuple[Sequence[Any], Any]:
        results = program(arrays, key)
        return results.arrays, results.rest.value

    return call
