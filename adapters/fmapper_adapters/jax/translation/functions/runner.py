"""Runs translated files in JAX, in a process without the source framework."""

from __future__ import annotations

import atexit
import inspect
import os
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper.verification import Draws, Runner
from fmapper_adapters.jax.trials.draws import functions_of


class JaxRunner(Runner):
    """A file of JAX or of one of its libraries."""

    @classmethod
    def prepare(cls, draws: Draws, *, double: bool) -> None:
        """Sets JAX up, and has functions of `jax.random` draw the numbers of the source.

        What both modes have in common is compiled once, and not with less effort: at XLA's level 0
        the second step of a network with attention over channels is NaN. XLA can wait for itself
        forever where computations are dispatched while others run.
        """
        update: Callable[[str, Any], None] = jax.config.update
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            cache = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, cache, ignore_errors=True)
            update("jax_compilation_cache_dir", cache)
        update("jax_cpu_enable_async_dispatch", False)
        update("jax_default_prng_impl", "rbg")  # whose first weights compile ten times as fast
        if double:
            update("jax_enable_x64", True)
        vars(jax.random).update(functions_of(draws))

    def array(self, value: Any) -> Any:
        """Returns an array of JAX."""
        return jnp.asarray(value)

    def order(self, value: dict[str, Any]) -> list[str]:
        """Returns keys in their own order, as the source has them; JAX would sort them."""
        return list(value)

    def run(self, model: Any, *, train: bool) -> list[Any]:
        """Returns the outputs, and notes what was drawn."""
        self.draws.begin()
        outputs = self.leaves(self.call(model, train=train))
        self.draws.end()
        return outputs

    @abstractmethod
    def call(self, model: Any, *, train: bool) -> Any:
        """Calls the model."""

    def loss(self, model: Any, *, train: bool) -> tuple[Any, list[Any]]:
        """Returns the loss that `descent` takes, and the outputs."""
        outputs = self.run(model, train=train)
        floats = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.mean(x * waves(x)) for x in floats), outputs

    def widen(self, x: Any) -> Any:
        """Returns an array of a model that is made in single precision as it is compared."""
        is_single = self.double and getattr(x, "dtype", None) in (jnp.float32, jnp.complex64)
        return x.astype(jnp.promote_types(x.dtype, jnp.float64)) if is_single else x


class StatelessRunner(JaxRunner):
    """A model as a tree of arrays, which a function of a random key computes.

    `differentiate(train)` gives a compiled function of the model, `named` the arrays of a tree.
    """

    @abstractmethod
    def differentiate(self, *, train: bool) -> Callable[[Any], tuple[list[Any], Any]]:
        """Returns a compiled function of the model: its outputs and gradients."""

    @abstractmethod
    def places(self, tree: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields the name of each array in the source, its order of axes, and the array."""

    def learn(self, model: Any, *, train: bool) -> tuple[list[Any], Any]:
        """Returns the outputs of a model, and its gradients."""
        return self.differentiate(train=train)(model)

    def gradients_by_name(self, model: Any, slopes: Any) -> dict[str, Any]:
        """Returns gradients by name."""
        return self.arrays_by_name(slopes)

    def arrays_by_name(self, model: Any) -> dict[str, Any]:
        """Returns arrays by name, in the layouts of the source."""
        arrays: dict[str, Any] = {}
        for key, order, held in self.places(model):
            array = held
            if order is not None:
                array = np.flip(array, tuple(at for at, i in enumerate(order) if i < 0))
                array = array.transpose(np.argsort([max(i, ~i) for i in order]))
            if key in self.weights and array.size == self.weights[key].size:
                array = array.reshape(self.weights[key].shape)
            if key in arrays:
                raise ValueError(f"two arrays of the file are {key}")
            arrays[key] = array
        return arrays

    def parts(self, array: Any, *place: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields the names of an array in the source, and the order and the array of each."""
        if not hasattr(self.net, "sources_of"):
            yield *self.net.source_of(*place), array
            return
        sources = self.net.sources_of(*place)
        blocks = self.net.blocks_of(array, len(sources))
        for (key, order), block in zip(sources, blocks, strict=True):
            yield key, order, block


def waves(x: Any) -> Any:
    """Returns the weights of an output in the loss."""
    dtype = x.dtype if x.dtype == jnp.float64 else jnp.float32
    return jnp.cos(jnp.arange(x.size, dtype=dtype)).reshape(x.shape)


def uphill(slopes: Any, outputs: list[Any]) -> tuple[list[Any], Any]:
    """Returns outputs and gradients, so that it is uphill also by complex numbers."""
    return outputs, jax.tree.map(jnp.conj, slopes)


@jax.jit
def descend(weights: Any, slopes: Any, rate: Any) -> Any:
    """Returns weights after a step."""
    return jax.tree.map(lambda p, g: p - rate * g, weights, slopes)


def takes_key(function: Any) -> bool:
    """Says whether a function takes a random key by keyword."""
    key = inspect.signature(function).parameters.get("key")  # or an argument of the model
    return key is not None and key.kind is inspect.Parameter.KEYWORD_ONLY


OWN_DRAWS = {name: getattr(jax.random, name) for name in functions_of(Draws())}


def with_own_draws(run: Callable[[], list[Any]]) -> list[Any]:
    """Runs a function while JAX draws numbers of its own."""
    given = {name: getattr(jax.random, name) for name in OWN_DRAWS}
    vars(jax.random).update(OWN_DRAWS)
    try:
        return run()
    finally:
        vars(jax.random).update(given)
