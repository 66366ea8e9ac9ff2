"""Rules for names: rename, tie, drop, lack, add a constant."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.rules.rule import (
    Arrays,
    Change,
    Names,
    Rule,
    matches,
    names_of,
    one_or_several,
    same_captures,
)
from fmapper.errors import CheckpointError
from fmapper.files.dtypes import numpy_dtype
from fmapper.tree.pattern import pattern

_MOST_ELEMENTS = 1 << 40
_DTYPES = (
    "bool|u?int(8|16|32|64)|float(16|32|64)|bfloat16|complex(64|128)|float8_(e4m3fn|e5m2|e8m0fnu)"
)


@dataclass(frozen=True, repr=False, init=False)
class Rename(Rule):
    """Renames arrays, numbers and texts, all at once.

    Args:
        from_: The old name, as a pattern, or several, of which the first match applies; or a
            mapping of old names to new ones.
        to: The new name, or as many as in `from_`, with the same captures.

    Raises:
        CheckpointError: The captures differ, or there are more names on one side.
    """

    do: ClassVar[str] = "rename"
    of_names: ClassVar[bool] = True
    from_: tuple[str, ...]
    to: tuple[str, ...]

    def __init__(self, from_: Names | Mapping[str, str], to: Names = ()) -> None:
        if isinstance(from_, Mapping):
            to, from_ = tuple(from_.values()), tuple(from_)
        object.__setattr__(self, "from_", names_of(from_))
        object.__setattr__(self, "to", names_of(to))
        if len(self.from_) != len(self.to):
            raise CheckpointError(
                f"{self}: {len(self.from_)} old names, but {len(self.to)} new ones"
            )
        for pair in zip(self.from_, self.to, strict=True):
            same_captures(self, pair)

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the arrays under their new names."""
        done = set()
        for old, new in zip(self.from_, self.to, strict=True):
            for name, captures in matches(old, arrays):
                if name not in done:
                    done.add(name)
                    yield Change([name], [(pattern(new).format(captures), arrays[name])])

    def inverse(self) -> Rule:
        """Returns the rule with both sides exchanged."""
        return Rename(self.to, self.from_)


@dataclass(frozen=True, repr=False)
class Tie(Rule):
    """Gives an array a second name.

    Attributes:
        from_: The existing name, as a pattern.
        to: The second name.
    """

    do: ClassVar[str] = "tie"
    from_: str
    to: str

    def __post_init__(self) -> None:
        same_captures(self, (self.from_, self.to))

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the arrays under both names."""
        for name, captures in matches(self.from_, arrays):
            second = pattern(self.to).format(captures)
            yield Change([name], [(name, arrays[name]), (second, arrays[name])])

    def inverse(self) -> Rule:
        """Returns the rule that drops the second name."""
        return Drop(self.to, tied_to=self.from_)


@dataclass(frozen=True, repr=False)
class Drop(Rule):
    """Drops arrays, numbers and texts.

    Attributes:
        names: Their names, as a pattern or several.
        tied_to: The name under which the same array is kept, if any.
        forget: Whether the inverse leaves them out as well, because nothing needs them.
    """

    do: ClassVar[str] = "drop"
    of_names: ClassVar[bool] = True
    names: Names
    tied_to: str = ""
    forget: bool = False

    _lost: ClassVar[str] = "what it drops is not kept"

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", one_or_several(self.names))
        for name in names_of(self.names):
            pattern(name)
        if self.tied_to:
            same_captures(self, (*names_of(self.names), self.tied_to))

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the names that are dropped."""
        done = set()
        for text in names_of(self.names):
            for name, captures in matches(text, arrays):
                other = pattern(self.tied_to).format(captures) if self.tied_to else name
                if other not in arrays:
                    raise CheckpointError(
                        f"{self}: {name} would be dropped, but there is no {other}"
                    )
                if name not in done:
                    done.add(name)
                    yield Change([name], [])

    def inverse(self) -> Rule:
        """Returns the rule that restores the tie; or with `forget` a `Lack`."""
        if self.forget:
            return Lack(self.names)
        if not self.tied_to or len(names_of(self.names)) != 1:
            return super().inverse()
        return Tie(self.tied_to, names_of(self.names)[0])


@dataclass(frozen=True, repr=False)
class Lack(Rule):
    """Asserts that arrays are absent: the inverse of a `Drop` with `forget`.

    Attributes:
        names: Their names, as a pattern or several.
    """

    do: ClassVar[str] = "lack"
    names: Names

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", one_or_several(self.names))
        for name in names_of(self.names):
            pattern(name)

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields no changes, and checks that the arrays are absent.

        Raises:
            CheckpointError: An array is present.
        """
        for text in names_of(self.names):
            for name, _ in matches(text, arrays):
                raise CheckpointError(f"{self}: there is {name}")
        yield Change([], [])

    def inverse(self) -> Rule:
        """Returns the rule that drops them."""
        return Drop(self.names, forget=True)


@dataclass(frozen=True, repr=False)
class AddConstant(Rule):
    """Adds an array with the same value everywhere.

    Attributes:
        name: Its name; not a pattern, but braces and stars in it need a backslash.
        shape: Its shape.
        value: Its value.
        dtype: Its dtype, by name.
    """

    do: ClassVar[str] = "constant"
    name: str
    shape: Sequence[int]
    value: bool | int | float
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if pattern(self.name).captures:
            raise CheckpointError(f"{self}: the name of a constant must not contain captures")
        if not re.fullmatch(_DTYPES, self.dtype):
            raise CheckpointError(f"{self}: {self.dtype!r} is not a dtype")
        if any(size < 0 for size in self.shape):
            raise CheckpointError(f"{self}: {list(self.shape)} is not a valid shape")
        if math.prod(self.shape) > _MOST_ELEMENTS:
            raise CheckpointError(f"{self}: an array of shape {list(self.shape)} is too large")
        scalar = LazyArray.full((), self.value, numpy_dtype(self.dtype)).read()
        if scalar.dtype.kind in "iub" and scalar != self.value:
            raise CheckpointError(f"{self}: {self.value} does not fit {self.dtype}")

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the constant."""
        array = LazyArray.full(self.shape, self.value, numpy_dtype(self.dtype))
        yield Change([], [(pattern(self.name).format({}), array)])

    def inverse(self) -> Rule:
        """Returns the rule that drops it."""
        return Drop(self.name)
