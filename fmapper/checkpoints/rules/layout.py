"""Rules for single arrays, which keep their names: transpose, reshape, interleave, cast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fmapper.backends.dtypes import dtype_name
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.rules.rule import OnEach, Rule
from fmapper.errors import CheckpointError


@dataclass(frozen=True, repr=False)
class Transpose(OnEach):
    """Permutes the dimensions.

    Attributes:
        names: The names, as a pattern or several.
        axes: For each new dimension the old one, as for `np.transpose`; empty to transpose
            matrices.
    """

    do: ClassVar[str] = "transpose"
    axes: Sequence[int] = (1, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "axes", tuple(self.axes))
        if sorted(self.axes) != list(range(len(self.axes))):
            raise CheckpointError(f"{self}: {list(self.axes)} is not a permutation of axes")

    def change(self, array: LazyArray, name: str) -> LazyArray:
        """Returns the array transposed."""
        return array.transpose(self.axes)

    def inverse(self) -> Rule:
        """Returns the inverse transpose."""
        return Transpose(self.names, tuple(map(self.axes.index, range(len(self.axes)))))


@dataclass(frozen=True, repr=False)
class Reshape(OnEach):
    """Reshapes arrays, with their elements in C order.

    Attributes:
        names: The names, as a pattern or several.
        shape: The shape; one size may be -1.
        back: The old shape, for the inverse; one size may be -1.
    """

    do: ClassVar[str] = "reshape"
    shape: Sequence[int] = ()
    back: Sequence[int] | None = None

    _lost: ClassVar[str] = "write back=[...], the shape that the arrays had"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.back is not None:
            object.__setattr__(self, "back", tuple(self.back))

    def change(self, array: LazyArray, name: str) -> LazyArray:
        """Returns the array in its new shape."""
        if self.back is not None and not _fits(array.shape, self.back):
            raise CheckpointError(f"it has shape {list(array.shape)}, not {list(self.back)}")
        return array.reshape(self.shape)

    def inverse(self) -> Rule:
        """Returns the inverse reshape."""
        if self.back is None:
            return super().inverse()
        return Reshape(self.names, self.back, self.shape)


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    if len(shape) != len(wanted):
        return False
    return all(size in (extent, -1) for extent, size in zip(shape, wanted, strict=True))


@dataclass(frozen=True, repr=False)
class Interleave(OnEach):
    """Interleaves the rows of equal parts of a dimension.

    `a0 a1 a2 b0 b1 b2` becomes `a0 b0 a1 b1 a2 b2` with 2 groups.

    Attributes:
        names: The names, as a pattern or several.
        groups: The number of parts.
        axis: The dimension.
        back: Whether to undo the interleaving.
    """

    do: ClassVar[str] = "interleave"
    groups: int = 2
    axis: int = 0
    back: bool = False

    def change(self, array: LazyArray, name: str) -> LazyArray:
        """Returns the array with its rows in another order."""
        if not -array.ndim <= self.axis < array.ndim:
            raise CheckpointError(f"an array of shape {list(array.shape)} has no axis {self.axis}")
        size, groups = array.shape[self.axis], self.groups
        if groups < 1 or size % groups:
            raise CheckpointError(f"an axis of {size} cannot be split into {groups} equal parts")
        return array.interleave(math.ceil(size / groups) if self.back else groups, self.axis)

    def inverse(self) -> Rule:
        """Returns the inverse rule."""
        return Interleave(self.names, self.groups, self.axis, not self.back)


@dataclass(frozen=True, repr=False)
class Cast(OnEach):
    """Casts floating and complex arrays; others stay as they are.

    Reading one raises `LossyCastError` if a finite value would become infinite.

    Attributes:
        names: The names, as a pattern or several.
        dtype: The dtype, by name.
        back: The old dtype, for the inverse; `dtype` must be able to represent all of its values.
    """

    do: ClassVar[str] = "cast"
    dtype: str = "float32"
    back: str | None = None

    _lost: ClassVar[str] = "what it rounds is not kept"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
            if self.back is not None:
                object.__setattr__(self, "back", dtype_name(self.back))
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def change(self, array: LazyArray, name: str) -> LazyArray:
        """Returns the array in the dtype."""
        if self.back is not None and array.dtype.name != self.back:
            raise CheckpointError(f"it has dtype {array.dtype.name}, not {self.back}")
        return array.astype(self.dtype, name)

    def inverse(self) -> Rule:
        """Returns the cast to the dtype that the arrays had."""
        return super().inverse() if self.back is None else Cast(self.names, self.back, self.dtype)
