"""Types of arrays and of functions that make arrays, for type checkers only.

An array becomes an array of another class if its framework changes, and so do arrays directly in a
dict, list or tuple. Any other tree keeps its class.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar


class Array(Protocol):
    """Attributes that arrays of NumPy, torch and JAX have, and models do not."""

    @property
    def shape(self) -> Any: ...  # noqa: D102
    def __dlpack__(self) -> Any: ...


class NamedTuple(Protocol):
    """Any named tuple, which keeps its class."""

    def _asdict(self) -> dict[str, Any]: ...


Old = TypeVar("Old", bound=Array)
Named = TypeVar("Named", bound=NamedTuple)
New_co = TypeVar("New_co", covariant=True)


class ArrayFunction(Protocol[New_co]):
    """A function of trees that makes arrays of one class, such as `to_numpy`."""

    @property
    def array_type(self) -> type[New_co]:
        """The class of its arrays, known to type checkers alone."""

    def __call__(self, *args: Any, **options: Any) -> Any: ...  # noqa: D102
