"""The part of the adapter that knows optimizers of optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fmapper import ConversionError
from fmapper.backends import Optimizers

if TYPE_CHECKING:
    from fmapper.training import OptimizerState


class JaxOptimizers(Optimizers):
    """Pairs of an optax transformation and its state, over a tree of parameters."""

    def is_optimizer(self, x: Any) -> bool:
        """Returns whether it is a pair of a transformation and its state."""
        is_pair = isinstance(x, tuple) and len(x) == 2
        return is_pair and all(callable(getattr(x[0], name, None)) for name in ("init", "update"))

    def params(self, model: Any) -> Any:
        """Returns the tree of parameters that an optimizer is made for.

        Of a converted model its `params`, of a pair of a Linen module and its variables their
        `params`, of a function and its parameters these, of another tree its inexact arrays.
        """
        if isinstance(getattr(model, "params", None), dict):
            return model.params
        is_pair = isinstance(model, tuple) and len(model) == 2 and callable(model[0])
        function, tree = model if is_pair else (None, model)
        if hasattr(function, "init") and "params" in tree:
            return tree["params"]
        return jax.tree.map(
            lambda x: x if jnp.issubdtype(getattr(x, "dtype", int), jnp.inexact) else None, tree
        )

    def trainable(self, model: Any) -> list[Any]:
        """Returns the parameters of a model."""
        return jax.tree.leaves(self.params(model))

    def read_optimizer(
        self, model: Any, optimizer: Any, scheduler: Any, every: int | None = None
    ) -> OptimizerState:
        """Returns an optimizer as plain data."""
        if scheduler is not None or every is not None:
            raise ConversionError(
                "scheduler= and scheduler_every= are for torch's schedulers; an optax "
                "transformation has its schedule"
            )
        from fmapper_adapters.jax.training import read

        return read.read(*self.unpack(model, optimizer))

    def unpack(self, model: Any, optimizer: Any) -> tuple[Any, ...]:
        """Returns the arguments of `read`: parameters, the transformation, its state."""
        return self.params(model), *optimizer

    def without_gradient(self, array: Any) -> Any:
        """Returns `jax.lax.stop_gradient` of an array."""
        return jax.lax.stop_gradient(array)

    def call_apart(self, function: Callable[..., Any], weights: Any, *args: Any) -> Any:
        """Returns the result of a function that multiplies with updates apart."""
        from fmapper_adapters.jax.training.products import call_apart

        return call_apart(function, weights, *args)

    def write_optimizer(self, model: Any, state: OptimizerState) -> tuple[Any, Any]:
        """Returns a transformation and its state."""
        from fmapper_adapters.jax.training import transformations

        return transformations.build(self.params(model), state), None
