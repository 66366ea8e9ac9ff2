"""Runs a translated file's NNX module, in a process without the source framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from fmapper.verification import Draws
from fmapper_adapters.jax.libraries import JaxRunner, descend, uphill, with_own_draws


class FlaxRunner(JaxRunner):
    """A module with `nnx.Dropout` as its only dropout."""

    def __init__(self, net: Any, name: str, given: Mapping[str, Any], draws: Draws) -> None:
        super().__init__(net, name, given, draws)
        gradient = nnx.grad(lambda model: self.loss(model, train=True), has_aux=True)
        self._differentiate = nnx.jit(lambda model: uphill(*gradient(model)))

    def make(self, *, train: bool, rate_of: Callable[[Any], float] = lambda _: 0.0) -> Any:
        """Returns the module with the weights of the source."""
        model = getattr(self.net, self.name)(rngs=nnx.Rngs(0))
        nnx.update(model, jax.tree.map(self.widen, nnx.state(model)))
        self.net.load_weights(model, self.weights)
        model.train() if train else model.eval()
        for layer in _dropouts(model):
            if rate_of(None) == 0 or not layer.broadcast_dims:
                layer.rate = rate_of(layer.rate)
        return model

    def call(self, model: Any, *, train: bool) -> Any:
        """Calls the module, which knows its mode."""
        return model(*self.args, **self.kwargs)

    def run_with_dropout(
        self, rate_of: Callable[[Any], float]
    ) -> Callable[[int], list[Any]] | None:
        """Returns a function of what is folded into the keys of the module."""
        model = self.make(train=True, rate_of=rate_of)
        if not self.draws.drawn and not any(layer.rate > 0 for layer in _dropouts(model)):
            return None
        graph, keys, *rest = nnx.split(model, nnx.RngKey, ...)

        @jax.jit
        def run(keys: Any, rest: Any, seed: int) -> list[Any]:
            folded = jax.tree.map(lambda key: _fold(key, seed), keys)
            return self.leaves(nnx.merge(graph, folded, *rest)(*self.args, **self.kwargs))

        return lambda seed: with_own_draws(lambda: run(keys, rest, seed))

    def learn(self, model: Any, *, train: bool) -> tuple[list[Any], Any]:
        """Returns the outputs of the module, and its gradients."""
        outputs, slopes = self._differentiate(model)
        return outputs, slopes

    def descend(self, model: Any, slopes: Any, rate: float) -> Any:
        """Changes the parameters in place."""
        nnx.update(model, descend(nnx.state(model, nnx.Param), slopes, rate))
        return model

    def gradients_by_name(self, model: Any, slopes: Any) -> dict[str, Any]:
        """Returns gradients by name."""
        graph, _, *rest = nnx.split(model, nnx.Param, ...)
        return self._by_name(nnx.merge(graph, slopes, *rest), nnx.Param)

    def arrays_by_name(self, model: Any) -> dict[str, Any]:
        """Returns arrays by name."""
        return self._by_name(model, nnx.Variable)

    def _by_name(self, model: Any, kind: type[Any]) -> dict[str, Any]:
        """Returns variables by their names in the source, as they are there."""
        arrays = {}
        for path, layer in nnx.iter_modules(model):
            tables = self.net.ARRAYS.items()
            renamed: dict[str, Any] = next(
                (names for cls, names in tables if isinstance(layer, cls)), {}
            )
            for key, variable in vars(layer).items():
                if not isinstance(variable, kind) or isinstance(variable, nnx.RngState):
                    continue
                source, order = renamed.get(key, (key, None))
                place = ".".join(map(str, (*path, source)))
                for end, other in getattr(self.net, "ORDERS", {}).items():
                    order = other if f".{place}".endswith(f".{end}") else order
                for name, value in self.split(place, np.asarray(variable[...])):
                    array = value if order is None else value.transpose(np.argsort(order))
                    arrays[self._source_name(name)] = array
        return arrays

    def _source_name(self, name: str) -> str:
        """Returns the name that the source has for an array."""
        for ours, theirs in getattr(self.net, "RENAMED", {}).items():
            if f".{name}".endswith(f".{ours}"):
                return name.removesuffix(ours) + str(theirs)
        return name


def _dropouts(model: Any) -> list[nnx.Dropout]:
    return [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, nnx.Dropout)]


def _fold(key: Any, seed: int) -> Any:
    if key.ndim:
        return jax.vmap(_fold, (0, None))(key, seed)
    return jax.random.fold_in(key, seed)
