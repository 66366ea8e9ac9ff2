"""Rules that compute: add a number, multiply by a number, add arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fmapper.checkpoints.lazy import LazyArray, add
from fmapper.checkpoints.rules.rule import (
    Arrays,
    Change,
    OnEach,
    Rule,
    about,
    groups,
    names_of,
    same_captures,
)
from fmapper.errors import CheckpointError
from fmapper.tree.pattern import pattern


@dataclass(frozen=True, repr=False)
class Offset(OnEach):
    """Adds a number to the elements of arrays, such as 1 to a norm that is stored minus 1.

    The result is rounded to the dtype of the array, so the inverse restores the values up to that
    rounding.

    Attributes:
        names: The names, as a pattern or several.
        value: The number.
    """

    do: ClassVar[str] = "offset"
    value: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "value", float(self.value))

    def change(self, array: LazyArray, name: str) -> LazyArray:
        """Returns the array with the number added."""
        return array.plus(self.value)

    def inverse(self) -> Rule:
        """Returns the rule that subtracts the number."""
        return Offset(self.names, -self.value)


@dataclass(frozen=True, repr=False)
class Scale(OnEach):
    """Multiplies the elements of arrays by a number, or divides them by it.

    The result is rounded to the dtype of the array, so the inverse restores the values up to that
    rounding; exactly, if the factor is a power of two.

    Attributes:
        names: The names, as a pattern or several.
        factor: The number.
        divide: Whether to divide by it.
    """

    do: ClassVar[str] = "scale"
    factor: float = 1.0
    divide: bool = False

    _lost: ClassVar[str] = "it multiplies by zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", float(self.factor))

    def change(self, array: LazyArray, name: str) -> LazyArray:
        """Returns the array multiplied or divided by the number."""
        return array.times(self.factor, divide=self.divide)

    def inverse(self) -> Rule:
        """Returns the rule that reverses it."""
        if not self.factor:
            return super().inverse()
        return Scale(self.names, self.factor, not self.divide)


@dataclass(frozen=True, repr=False)
class Sum(Rule):
    """Adds arrays of one shape and dtype, such as the two biases of a recurrent cell.

    Attributes:
        from_: Their names, as patterns with the same captures.
        to: The name of the result.
    """

    do: ClassVar[str] = "sum"
    from_: Sequence[str]
    to: str

    _lost: ClassVar[str] = "the terms of a sum cannot be told apart"

    def __post_init__(self) -> None:
        object.__setattr__(self, "from_", names_of(self.from_))
        same_captures(self, (*self.from_, self.to))
        if len({*self.from_}) != len(self.from_) or not self.from_:
            raise CheckpointError(f"{self}: the names of the terms must be distinct")

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the sums."""
        for captures, names in groups(self, self.from_, arrays):
            new = pattern(self.to).format(captures)
            with about(self, new):
                total = add([arrays[name] for name in names])
            yield Change(names, [(new, total)])
