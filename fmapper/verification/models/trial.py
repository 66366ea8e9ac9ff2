"""The interface with which `verify` runs and trains a model: a function of its arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Loss(Protocol):
    """A scalar function of the output of a model."""

    def __call__(self, output: Any, constant: Callable[[Any], Any], /) -> Any:
        """Returns the loss; `constant` converts a NumPy array to the framework of the output."""


class Stepper(Protocol):
    """The steps of an optimiser."""

    def __call__(
        self, weights: Mapping[str, Any], gradients: Mapping[str, Any], /
    ) -> dict[str, Any]:
        """Returns the weights after a step, by name, as NumPy arrays."""


@dataclass(frozen=True, slots=True)
class Call:
    """The results of a call.

    Attributes:
        output: The output, with arrays of the framework.
        flatten: Returns the arrays in it, in the framework's order.
        state: The state after the call; see `Trial`.
        draws: The random numbers that it drew, by kind and shape, in a line; empty for none, None
            if unknown.
        rates: The rates of its dropout, which was left out.
        find_dtypes: Returns the floating dtypes in which it computed.
    """

    output: Any
    flatten: Callable[[Any], list[Any]]
    state: Mapping[str, Any]
    draws: str | None = ""
    rates: frozenset[float] = frozenset()
    find_dtypes: Callable[[], frozenset[str]] = frozenset

    @property
    def leaves(self) -> list[Any]:
        """The arrays in the output."""
        return self.flatten(self.output)


@dataclass(frozen=True, slots=True)
class Slope:
    """The gradients of a loss.

    Attributes:
        loss: The loss.
        gradients: The gradient of each weight by name, as NumPy arrays, without those on which the
            loss does not depend.
        state: The state after the call.
        refused: Why the framework cannot differentiate the model; empty if it can.
    """

    loss: float = 0.0
    gradients: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


class Trial(ABC):
    """A model that is called and differentiated on the same inputs in one mode.

    The model is not changed. Dropout in training is left out, and other random numbers come from
    `Draws`, so that two models draw the same.

    Attributes:
        weights: The arrays that the model trains, by their names in `state`, as NumPy arrays.
        fixed: Parameters that it does not train, as NumPy arrays.
        state: The other arrays, as arrays of the framework: buffers, running statistics, keys.
        aliases: Other names of tied arrays -> the name above.
    """

    weights: dict[str, Any]
    fixed: dict[str, Any]
    state: dict[str, Any]
    aliases: Mapping[str, str]

    @abstractmethod
    def call(
        self,
        weights: Mapping[str, Any],
        *,
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
        double: bool = False,
    ) -> Call:
        """Calls the model.

        Args:
            weights: Weights by name, as NumPy arrays.
            inputs: Inputs in place of its own, which may be NumPy arrays.
            double: Whether to compute in double precision: all floating arrays are cast to it, and
                casts to lower precision have no effect.
        """

    @abstractmethod
    def slope(
        self,
        weights: Mapping[str, Any],
        loss: Loss | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        double: bool = False,
    ) -> Slope:
        """Differentiates a loss of the output with respect to the weights.

        Args:
            weights: Weights by name, as NumPy arrays.
            loss: The loss; None for the sum of the means of all floating arrays of the output times
                `cos(0), cos(1), ...`.
            state: The state before the call; None for the initial one.
            double: Whether to compute in double precision.
        """

    @abstractmethod
    def draw(
        self, weights: Mapping[str, Any], seeds: Sequence[int], *, double: bool = False
    ) -> dict[float, list[list[Any]]]:
        """Returns the output for each seed, with the dropout of one rate at a time.

        It is drawn at one half at least. The key nan has the outputs without dropout, but with all
        other noise. Empty if the model draws nothing; a single output for a rate if that is not
        random.
        """

    @abstractmethod
    def noise(
        self, weights: Mapping[str, Any], seeds: Sequence[int], *, double: bool = False
    ) -> list[list[Any]]:
        """Returns the leaves of the output for each seed, with unchanged dropout and noise.

        A single output if nothing is random.
        """

    def stepper(self, optimizer: Any) -> Stepper | None:
        """Returns a stepper of the framework's optimiser; None if it is not one."""
        return None
