"""Types of the arguments and results of movers, for type checkers only.

An array becomes an array of another class if its framework changes, and so do arrays directly in a
dict, list or tuple. Any other tree keeps its class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypedDict, TypeVar, Unpack, overload

if TYPE_CHECKING:
    from fmapper.moves.mover import Mover
    from fmapper.moves.plan import Plan

    Base = Mover
else:

    class Base:  # noqa: D101
        ...


T = TypeVar("T")
K = TypeVar("K")
New = TypeVar("New")


class Options(TypedDict, total=False):
    """The options of every mover."""

    dtype: Any
    copy: bool | None
    strict: bool | None
    report: Callable[[Plan], object] | None


class More(Options, total=False):
    """The options of a mover that chooses a backend."""

    device: Any


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


class ArrayMover(Base, Generic[New]):
    """A mover that makes arrays of one class: `to_numpy`, `to_torch`, `to_jax`."""

    # fmt: off
    @overload
    def __call__(self, **options: Unpack[More]) -> ArrayMover[New]: ...
    @overload
    def __call__(self, tree: Array, **options: Unpack[More]) -> New: ...
    @overload
    def __call__(self, tree: dict[K, Old], **options: Unpack[More]) -> dict[K, New]: ...
    @overload
    def __call__(self, tree: list[Old], **options: Unpack[More]) -> list[New]: ...
    @overload
    def __call__(self, tree: Named, **options: Unpack[More]) -> Named: ...
    @overload
    def __call__(self, tree: tuple[Old, ...], **options: Unpack[More]) -> tuple[New, ...]: ...
    @overload
    def __call__(self, tree: T, **options: Unpack[More]) -> T: ...
    def __call__(self, tree: Any = ..., **options: Any) -> Any: ...  # noqa: D102
    # fmt: on
