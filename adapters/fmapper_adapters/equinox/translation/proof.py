"""Runs a translated file's module in Equinox, in a process without the source framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
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


class EquinoxRunner(StatelessRunner):
    """A module with `eqx.nn.Dropout` as its only dropout."""

    def __init__(self, net: Any, name: str, given: Mapping[str, Any], draws: Draws) -> None:
        super().__init__(net, name, given, draws)
        self._differentiate = functools.cache(self._compile)

    def make(self, *, train: bool) -> Any:
        """Returns the module with the weights of the source."""
        model = jax.tree.map(self.widen, getattr(self.net, self.name)(key=jax.random.key(0)))
        model = self.net.load_weights(model, self.weights)
        return model if train else eqx.nn.inference_mode(model)

    def call(self, model: Any, *, train: bool) -> Any:
        """Calls the module without dropout."""
        key = {"key": jax.random.key(0)} if train and takes_key(type(model).__call__) else {}
        return _with_rates(model)(*self.args, **self.kwargs, **key)

    def run_with_dropout(
        self, rate_of: Callable[[Any], float]
    ) -> Callable[[int], list[Any]] | None:
        """Returns a function of a random key's seed."""
        model = _with_rates(self.make(train=True), rate_of)
        layers = filter(_is_dropout, jax.tree.leaves(model, is_leaf=_is_dropout))
        if not self.draws.drawn and not any(layer.p > 0 for layer in layers):
            return None

        @eqx.filter_jit
        def run(model: Any, key: Any) -> list[Any]:
            keys = {"key": key} if takes_key(type(model).__call__) else {}
            return self.leaves(model(*self.args, **self.kwargs, **keys))

        return lambda seed: with_own_draws(lambda: run(model, jax.random.key(seed)))

    def differentiate(self, *, train: bool) -> Callable[[Any], tuple[list[Any], Any]]:
        """Returns a compiled function of the module: outputs and gradients."""
        return self._differentiate(train)

    def _compile(self, train: bool) -> Callable[[Any], tuple[list[Any], Any]]:
        def loss(model: Any) -> Any:
            return self.loss(model, train=train)

        gradient: Callable[[Any], Any] = eqx.filter_grad(loss, has_aux=True)
        compiled: Callable[[Any], Any] = eqx.filter_jit(lambda model: uphill(*gradient(model)))
        return compiled

    def descend(self, model: Any, slopes: Any, rate: float) -> Any:
        """Returns the module after a step."""
        weights, rest = eqx.partition(model, eqx.is_inexact_array)
        return eqx.combine(descend(weights, slopes, rate), rest)

    def places(self, tree: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields the arrays of the module."""
        leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
        for path, leaf in leaves:
            yield from self.parts(np.asarray(leaf), tree, path)


def _is_dropout(x: Any) -> bool:
    return isinstance(x, eqx.nn.Dropout)


def _with_rates(model: Any, rate_of: Callable[[Any], float] = lambda _: 0.0) -> Any:
    def change(x: Any) -> Any:
        if not _is_dropout(x) or (getattr(x, "broadcast_dims", False) and rate_of(None) != 0):
            return x
        return eqx.tree_at(lambda d: d.p, x, rate_of(x.p))

    return jax.tree.map(change, model, is_leaf=_is_dropout)
