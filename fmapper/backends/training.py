"""The facet of optimizers: what a framework keeps beside a model that trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fmapper.backends.framework import Framework


class Optimizers(Framework):
    """Optimizers as plain data, and back.

    The parameters of a model have an order, in which all methods give and take them.
    """

    lacking: ClassVar[str] = "optimizers"

    @abstractmethod
    def is_optimizer(self, x: Any) -> bool:
        """Returns whether an object is an optimizer, with its state, of this framework."""

    @abstractmethod
    def trained(self, model: Any) -> list[Any]:
        """Returns the arrays of a model that an optimizer may update, in order."""

    @abstractmethod
    def with_trained(self, model: Any, arrays: Sequence[Any]) -> Any:
        """Returns a copy of a model with other arrays in their place; the model stays as it is."""

    @abstractmethod
    def read_optimizer(self, model: Any, optimizer: Any, scheduler: Any) -> Any:
        """Returns an `OptimizerState`.

        Raises:
            ConversionError: Says which optimizer, setting or schedule cannot be read.
        """

    @abstractmethod
    def write_optimizer(self, model: Any, state: Any) -> tuple[Any, Any]:
        """Returns an optimizer for a model, and a scheduler; None where the optimizer has it.

        Raises:
            ConversionError: Says which algorithm or setting has no counterpart.
        """


def by_position(slots: Mapping[str, Mapping[int, Any]], slot: str) -> Mapping[int, Any]:
    """Returns the arrays of a slot, by the position of their parameter."""
    return slots.get(slot, {})
