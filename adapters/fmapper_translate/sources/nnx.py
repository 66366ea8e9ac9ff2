"""Flax NNX."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from fmapper_translate.functions import is_of_model
from fmapper_translate.sources import Source, Tell

if TYPE_CHECKING:
    from fmapper_translate.recording import Operation


class NnxSource(Source):
    """Answers the questions of a recording about Flax NNX."""

    def is_array(self, value: Any) -> bool:
        """Returns whether something is an array, or a variable that holds one; keys are not."""
        if isinstance(value, nnx.Variable):
            value = value.get_raw_value()
        return isinstance(value, jax.Array) and not is_key(value)

    def is_module(self, value: Any) -> bool:
        """Returns whether something is an `nnx.Module`."""
        return isinstance(value, nnx.Module)

    def is_made_of_layers(self, value: Any) -> bool:
        """Returns whether an object is a module."""
        return isinstance(value, nnx.Module)

    def draws(self, operation: Operation) -> bool:
        """Returns False: operations are not watched."""
        return False

    def classes(self, model: Any) -> list[type]:
        """Returns the classes of a model's parts, and their bases."""
        kinds = dict.fromkeys(type(part) for _, part in nnx.iter_modules(model))
        return [base for kind in kinds for base in kind.__mro__]

    def compiles(self, model: Any) -> bool:
        """Returns whether a decorator compiles functions of a model's classes or their modules."""
        classes = [cls for cls in self.classes(model) if is_of_model(_file_of(cls))]
        spaces = [*map(vars, classes), *(vars(sys.modules[cls.__module__]) for cls in classes)]
        values = [value for space in spaces for value in list(space.values())]
        return any(hasattr(value, "lower") and hasattr(value, "__wrapped__") for value in values)

    def watch(self, tell: Tell) -> AbstractContextManager[None]:
        """Returns a context that does nothing: calls say what is computed."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def compute(self, *, compiles: bool = False) -> Iterator[None]:
        """Does not compile functions of the model, and has keys of a dtype that is theirs."""
        with jax.disable_jit(compiles), jax.enable_custom_prng(True):
            yield


def _file_of(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or "<none>"


def is_key(value: Any) -> bool:
    """Returns whether something is a key of random numbers."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
