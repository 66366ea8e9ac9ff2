"""Equinox."""

from __future__ import annotations

import types
from typing import Any

import equinox as eqx
import jax

from fmapper_translate.sources.nnx import NnxSource, is_key


class EquinoxSource(NnxSource):
    """Answers the questions of a recording about Equinox."""

    turns = False

    def plain(self, value: Any) -> Any:
        """Returns a value; of a method, which is a module in Equinox, a method of Python."""
        is_method = isinstance(value, eqx.Module) and type(value).__name__ == "BoundMethod"
        return types.MethodType(value.__func__, value.__self__) if is_method else value

    def is_array(self, value: Any) -> bool:
        """Returns whether something is an array; keys are not."""
        return isinstance(value, jax.Array) and not is_key(value)

    def is_module(self, value: Any) -> bool:
        """Returns whether something is an `eqx.Module`."""
        return isinstance(value, eqx.Module)

    def is_made_of_layers(self, value: Any) -> bool:
        """Returns whether an object is a module."""
        return isinstance(value, eqx.Module)

    def classes(self, model: Any) -> list[type]:
        """Returns the classes of a model's parts, and their bases."""
        kinds: dict[type, None] = {}
        todo = [model.module]
        while todo:
            part = todo.pop()
            if isinstance(part, eqx.Module):
                kinds[type(part)] = None
                todo += vars(part).values()
            elif isinstance(part, list | tuple):
                todo += part
            elif isinstance(part, dict):
                todo += part.values()
        return [base for kind in kinds for base in kind.__mro__]
