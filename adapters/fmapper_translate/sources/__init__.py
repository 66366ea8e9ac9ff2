"""Frameworks that models are transcribed from.

torch        PyTorch
nnx          Flax NNX
linen        Flax Linen
equinox      Equinox
derivatives  derivatives of PyTorch models' own, which run when a model is recorded
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmapper_translate.recording import Operation

Tell = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class Source(ABC):
    """Answers the questions of a recording about the framework of a model.

    Attributes:
        turns: Whether functions may be called again with conditions the other way round.
    """

    turns = True

    @abstractmethod
    def is_array(self, value: Any) -> bool:
        """Returns whether something is an array of the framework."""

    def plain(self, value: Any) -> Any:
        """Returns a value as code sees it, without what the framework wraps it in."""
        return value

    @abstractmethod
    def is_module(self, value: Any) -> bool:
        """Returns whether something is a module of the framework."""

    @abstractmethod
    def is_made_of_layers(self, value: Any) -> bool:
        """Returns whether the functions in which an object was made have to be able to make it."""

    def draws_values(self, value: Any) -> bool:
        """Returns whether the first values of such an object are drawn."""
        return True

    @abstractmethod
    def draws(self, operation: Operation) -> bool:
        """Returns whether an operation draws random numbers."""

    @abstractmethod
    def classes(self, model: Any) -> list[type]:
        """Returns the classes of a model's parts, and their bases, that a file has to have."""

    def compiles(self, model: Any) -> bool:
        """Returns whether functions of a model are compiled, so that their code runs but once."""
        return False

    @abstractmethod
    def watch(self, tell: Tell) -> AbstractContextManager[None]:
        """Returns a context that tells which operations run; see `watch_operations`."""

    @abstractmethod
    def compute(self, *, compiles: bool = False) -> AbstractContextManager[None]:
        """Returns a context in which models are called to be recorded.

        Args:
            compiles: Whether functions of the model are compiled by a decorator of theirs.
        """
