"""Flax Linen."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen

from fmapper_translate.sources.nnx import NnxSource, is_key
from fmapper_translate.torch.tables import plain_class


class LinenSource(NnxSource):
    """Answers the questions of a recording about Flax Linen."""

    turns = False  # a module makes its layers anew in each call, and under other names in another

    def __init__(self) -> None:
        self.kinds: dict[type, None] = {}

    def is_array(self, value: Any) -> bool:
        """Returns whether something is an array, or a variable that holds one; keys are not."""
        if isinstance(value, linen.Variable):
            value = value.value
        return isinstance(value, jax.Array) and not is_key(value)

    def is_module(self, value: Any) -> bool:
        """Returns whether something is a `linen.Module`."""
        return isinstance(value, linen.Module)

    def is_made_of_layers(self, value: Any) -> bool:
        """Returns False: modules are made in calls."""
        return False

    def classes(self, model: Any) -> list[type]:
        """Returns the classes of modules that were called, and their bases."""
        return [base for kind in (type(model.module), *self.kinds) for base in kind.__mro__]

    def note(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Notes the class of a module whose method is called; see `linen.intercept_methods`."""
        self.kinds[plain_class(type(context.module))] = None
        return call(*args, **kwargs)
