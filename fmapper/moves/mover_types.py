"""Types of the arguments and results of movers, for type checkers only; see `array_types`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack, overload

from fmapper.array_types import Array, Named, Old

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


class ArrayMover(Base, Generic[New]):
    """A mover that makes arrays of one class: `to_numpy`, `to_torch`, `to_jax`."""

    array_type: type[New]

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
