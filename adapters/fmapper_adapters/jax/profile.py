"""Runs models for inference with JAX, and counts the operations and bytes of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fmapper import fleaves, fmap
from fmapper.backends import Counts
from fmapper_adapters.jax import kernels
from fmapper_adapters.jax.arrays.packed import PackedArray


def runner(call: Callable[..., Any], model: Any, compile: bool | None) -> Callable[..., Any]:
    """Runs `call` under `jax.jit`, with the arrays of the model as arguments.

    The model is rebuilt around them with `fmap`, so that any tree works, whether JAX knows its
    classes or not; everything else in the model and the inputs is static.
    """
    if compile is False:
        return lambda *inputs: call(model, *inputs)
    arrays = list(
        {
            id(leaf): leaf for leaf in fleaves(model) if isinstance(leaf, jax.Array | PackedArray)
        }.values()
    )

    def program(values: list[Any], dynamic: list[Any], static: tuple[Any, ...]) -> Any:
        new = {id(old): value for old, value in zip(arrays, values, strict=True)}
        filled = fmap(lambda leaf: new.get(id(leaf), leaf), model)
        tree, fixed = static
        given = iter(dynamic)
        leaves = [next(given) if is_array else value for is_array, value in fixed]
        return call(filled, *jax.tree.unflatten(tree, leaves))

    jitted = jax.jit(program, static_argnums=2)

    def run(*inputs: Any) -> Any:
        leaves, tree = jax.tree.flatten(inputs)
        fixed = tuple(
            (True, None) if isinstance(leaf, jax.Array) else (False, leaf) for leaf in leaves
        )
        return jitted(
            arrays, [leaf for leaf in leaves if isinstance(leaf, jax.Array)], (tree, fixed)
        )

    return run


def count(call: Callable[..., Any], model: Any, inputs: Sequence[Any]) -> Counts:
    """Counts a run in its jaxpr; nothing is computed."""
    traced = jax.make_jaxpr(runner(call, model, None))(*inputs)
    return kernels.count(traced)
