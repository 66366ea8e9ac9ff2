"""A model made of the source code that was written for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fmapper.programs import Program
from fmapper.translation import Source, run_file
from fmapper_adapters.jax.libraries import ProgramArrays, key_for


def build(program: Program, source: Source) -> Any:
    """Returns the module that a file makes, with the arrays of its program."""
    module = run_file(source)
    model = module[source.name](key=jax.random.key(0))
    arrays = ProgramArrays(program)
    source.weights.keep_rest(arrays)
    return module["load_weights"](model, arrays)


def for_evaluation(model: Any) -> Any:
    """Returns a model whose layers and classes are in evaluation mode."""
    return eqx.nn.inference_mode(model)


def open_file(
    net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
) -> tuple[Any, dict[str, Any]]:
    """Returns the module of a file in a mode, and the key that a call takes."""
    make = getattr(net, name)
    arrays, rest = _initial(make)
    model = net.load_weights(eqx.combine(arrays, rest), jax.tree.map(jnp.asarray, dict(weights)))
    model = _with_rest(make, arrays, model)
    return model if train else for_evaluation(model), key_for(type(model).__call__)


@functools.cache
def _initial(make: Callable[..., Any]) -> tuple[Any, Any]:
    """Returns the arrays of a new module, and the rest of it.

    Arrays are zeros, since the first ones take long to draw, unless the constructor reads them.
    """
    try:
        shapes = eqx.filter_eval_shape(make, key=jax.random.key(0))
    except jax.errors.JAXTypeError:
        made: tuple[Any, Any] = eqx.partition(make(key=jax.random.key(0)), eqx.is_array)
        return made
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    arrays, rest = eqx.partition(shapes, is_shape)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays), rest


def _with_rest(make: Callable[..., Any], arrays: Any, model: Any) -> Any:
    """Returns a model with the arrays of a new one in the place of those that were not loaded."""
    own, rest = eqx.partition(model, eqx.is_array)
    leaves, tree = jax.tree.flatten(own)
    pairs = zip(leaves, jax.tree.leaves(arrays), strict=True)
    lacking = [at for at, (leaf, first) in enumerate(pairs) if leaf is first]
    if not lacking:
        return model

    def compute() -> list[Any]:
        made = jax.tree.leaves(eqx.filter(make(key=jax.random.key(0)), eqx.is_array))
        return [made[at] for at in lacking]

    try:
        computed = jax.jit(compute)()
    except jax.errors.JAXTypeError:
        return model  # it has the arrays of a new one
    for at, array in zip(lacking, computed, strict=True):
        leaves[at] = array
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)
