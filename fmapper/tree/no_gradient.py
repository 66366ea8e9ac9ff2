"""The placeholder in a gradient for a part of the model that is not trained."""

from __future__ import annotations

from contextvars import ContextVar
from typing import final


@final
class NoGradient:
    """The class of `no_gradient`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "no_gradient"

    def __reduce__(self) -> str:
        return "no_gradient"  # the one object again, also for copy.copy and pickle


no_gradient = NoGradient()
"""Stands in a gradient where the model has no array that is trained: a number, a frozen weight.

It is a node without children, so that maps over a gradient leave it alone, and `fmap` over a model
and its gradient keeps the leaf of the model there. Only the tables of a torch module, which take
nothing but tensors, have None in its place.
"""

filling_gradient: ContextVar[bool] = ContextVar("fmapper_filling_gradient", default=False)
"""Whether the tree that is being rebuilt is a gradient: tensors in it are not parameters."""


def is_gradient() -> bool:
    """Returns whether the node that is being rebuilt is part of a gradient."""
    return filling_gradient.get()
