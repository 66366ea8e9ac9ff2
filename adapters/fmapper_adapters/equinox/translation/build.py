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
    """Returns the module of a file in a mode, and the key that a call takes in training."""
    model = _initial(getattr(net, name))
    model = net.load_weights(model, jax.tree.map(jnp.asarray, dict(weights)))
    if not train:
        return for_evaluation(model), {}
    return model, key_for(type(model).__call__)


@functools.cache
def _initial(cls: Callable[..., Any]) -> Any:
    """Returns a module with its first arrays, which take long to draw."""
    return cls(key=jax.random.key(0))
