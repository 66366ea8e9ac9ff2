"""Runs a translated file's function in JAX, in a process without the source framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fmapper.verification import Draws
from fmapper_adapters.jax.libraries import (
    StatelessRunner,
    descend,
    takes_key,
    uphill,
    with_own_draws,
)


class FunctionRunner(StatelessRunner):
    """A function of trees of parameters, and buffers after them, with a function `dropout`."""

    def __init__(self, net: Any, name: str, given: Mapping[str, Any], draws: Draws) -> None:
        super().__init__(net, name, given, draws)
        self._differentiate = functools.cache(self._compile)
        self._dropout = getattr(net, "dropout", None)
        if self._dropout is not None:
            net.dropout = lambda x, *_, **__: x

    def make(self, *, train: bool) -> tuple[Any, ...]:
        """Returns the trees with the weights of the source."""
        if not hasattr(self.net, "load_weights"):
            return ()
        trees = getattr(self.net, f"init_{self.name}")(jax.random.key(0))
        trees = self.net.load_weights(jax.tree.map(self.widen, trees), self.weights)
        return tuple(trees) if hasattr(self.net, "BUFFERS") else (trees,)

    def call(self, model: Any, *, train: bool) -> Any:
        """Calls the function."""
        function = getattr(self.net, self.name)
        key = {"key": jax.random.key(0)} if train and takes_key(function) else {}
        return function(*model, *self.args, **self.kwargs, **key)

    def run_with_dropout(
        self, rate_of: Callable[[Any], float]
    ) -> Callable[[int], list[Any]] | None:
        """Returns a function of a random key's seed."""
        model, drop = self.make(train=True), self._dropout
        if drop is None and not self.draws.drawn:
            return None

        def dropout(x: Any, rate: Any, broadcast_dims: Any = (), key: Any = None) -> Any:
            chosen = rate if broadcast_dims else rate_of(rate)
            return x if chosen == 0 or drop is None else drop(x, chosen, broadcast_dims, key)

        @jax.jit
        def run(model: Any, key: Any) -> list[Any]:
            function = getattr(self.net, self.name)
            keys = {"key": key} if takes_key(function) else {}
            return self.leaves(function(*model, *self.args, **self.kwargs, **keys))

        def outputs(seed: int) -> list[Any]:
            still = getattr(self.net, "dropout", None)
            self.net.dropout = dropout
            try:
                return with_own_draws(lambda: run(model, jax.random.key(seed)))
            finally:
                self.net.dropout = still

        return outputs

    def differentiate(self, *, train: bool) -> Callable[[Any], tuple[list[Any], Any]]:
        """Returns a compiled function of the trees: outputs, and gradients of the parameters."""
        return self._differentiate(train)

    def _compile(self, train: bool) -> Callable[[Any], tuple[list[Any], Any]]:
        def loss(first: Any, rest: Any) -> tuple[Any, list[Any]]:
            return self.loss((first, *rest), train=train)

        gradient = jax.grad(loss, has_aux=True)
        compiled = jax.jit(lambda first, rest: uphill(*gradient(first, rest)))
        return lambda model: compiled(model[0], model[1:])

    def descend(self, model: Any, slopes: Any, rate: float) -> Any:
        """Returns the trees after a step of the parameters."""
        first, *rest = model
        return descend(first, slopes, rate), *rest

    def places(self, tree: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields the arrays of the parameters."""
        tree = tree[0] if isinstance(tree, tuple) else tree
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            yield from self.parts(np.asarray(leaf), path)
