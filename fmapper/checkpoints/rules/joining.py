"""Rules for several arrays: split, concatenate, stack, unstack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fmapper.checkpoints.lazy import concatenate, stack
from fmapper.checkpoints.rules.rule import (
    Arrays,
    Change,
    Rule,
    about,
    groups,
    matches,
    names_of,
    same_captures,
)
from fmapper.errors import CheckpointError
from fmapper.tree.pattern import pattern

_MOST = 1 << 20  # arrays into which one is split


@dataclass(frozen=True, repr=False)
class Split(Rule):
    """Splits an array along a dimension.

    Attributes:
        from_: Its name, as a pattern.
        to: The names of the parts.
        axis: The dimension.
        sizes: The sizes of the parts; empty for equal sizes.
    """

    do: ClassVar[str] = "split"
    from_: str
    to: Sequence[str]
    axis: int = 0
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", names_of(self.to))
        same_captures(self, (self.from_, *self.to))
        _check_sizes(self, self.to, self.sizes)

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the parts of each matching array."""
        for name, captures in matches(self.from_, arrays):
            with about(self, name):
                parts = arrays[name].split(self.sizes or len(self.to), self.axis)
            new = [pattern(target).format(captures) for target in self.to]
            yield Change([name], list(zip(new, parts, strict=True)))

    def inverse(self) -> Rule:
        """Returns the rule that joins the parts."""
        return Concatenate(self.to, self.from_, self.axis, self.sizes)


@dataclass(frozen=True, repr=False)
class Concatenate(Rule):
    """Joins arrays along an existing dimension.

    Attributes:
        from_: Their names, as patterns with the same captures, in order.
        to: The name of the result.
        axis: The dimension.
        sizes: Their sizes along it, which the inverse needs; empty for equal sizes.
    """

    do: ClassVar[str] = "concatenate"
    from_: Sequence[str]
    to: str
    axis: int = 0
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "from_", names_of(self.from_))
        same_captures(self, (*self.from_, self.to))
        _check_sizes(self, self.from_, self.sizes)

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the arrays that are joined.

        Raises:
            CheckpointError: An array is missing, or has another size.
        """
        for captures, names in groups(self, self.from_, arrays):
            new = pattern(self.to).format(captures)
            pieces = [arrays[name] for name in names]
            with about(self, new):
                joined = concatenate(pieces, self.axis)
                sizes = [array.shape[self.axis] for array in pieces]
                if sizes != list(self.sizes or sizes[:1] * len(sizes)):
                    raise CheckpointError(f"the arrays have the sizes {sizes}: write sizes={sizes}")
            yield Change(names, [(new, joined)])

    def inverse(self) -> Rule:
        """Returns the rule that splits the result."""
        return Split(self.to, self.from_, self.axis, self.sizes)


def _check_sizes(rule: Rule, names: Sequence[str], sizes: Sequence[int] | None) -> None:
    if len({*names}) != len(names) or not names:
        raise CheckpointError(f"{rule}: the names of the parts must be distinct")
    if sizes is not None:
        object.__setattr__(rule, "sizes", tuple(sizes))
        if len(sizes) != len(names) or min(sizes) < 0:
            raise CheckpointError(f"{rule}: {len(names)} names, but sizes {list(sizes)}")


@dataclass(frozen=True, repr=False)
class Stack(Rule):
    """Joins numbered arrays along a new dimension: layers to scan, experts.

    Attributes:
        from_: Their names, as a pattern.
        to: The name of the result.
        over: The capture with their number, which begins at 0, or as in `{i:4-7}`.
        axis: The new dimension.
    """

    do: ClassVar[str] = "stack"
    from_: str
    to: str
    over: str
    axis: int = 0

    def __post_init__(self) -> None:
        _check_over(self, self.from_, self.to, self.over)

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the stacks.

        Raises:
            CheckpointError: A number is missing or malformed.
        """
        old = pattern(self.from_)
        stacks: dict[tuple[tuple[str, str], ...], dict[int, str]] = {}
        for name, captures in matches(self.from_, arrays):
            digits = captures.pop(self.over)
            if not _is_number(digits):
                raise CheckpointError(f"{self}: in {name}, {digits!r} is not a number")
            stacks.setdefault(tuple(captures.items()), {})[int(digits)] = name
        first, last = old.capture(self.over).numbers or (0, None)
        for key, numbered in stacks.items():
            stop = max(numbered) if last is None else last
            names = []
            for number in range(first, stop + 1):
                if number not in numbered:
                    missing = old.format({**dict(key), self.over: str(number)})
                    example = next(iter(numbered.values()))
                    raise CheckpointError(f"{self}: there is {example}, but no {missing}")
                names.append(numbered[number])
            new = pattern(self.to).format(dict(key))
            with about(self, new):
                yield Change(names, [(new, stack([arrays[name] for name in names], self.axis))])

    def inverse(self) -> Rule:
        """Returns the rule that splits the stack."""
        return Unstack(self.to, self.from_, self.over, self.axis)


@dataclass(frozen=True, repr=False)
class Unstack(Rule):
    """Splits an array into numbered ones along a dimension, which is dropped.

    Attributes:
        from_: Its name, as a pattern.
        to: Their names, as a pattern.
        over: The capture with their number, which begins at 0, or as in `{i:4-7}`.
        axis: The dimension.
    """

    do: ClassVar[str] = "unstack"
    from_: str
    to: str
    over: str
    axis: int = 0

    def __post_init__(self) -> None:
        _check_over(self, self.to, self.from_, self.over)

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the arrays of each stack."""
        new = pattern(self.to)
        first, last = new.capture(self.over).numbers or (0, None)
        for name, captures in matches(self.from_, arrays):
            array = arrays[name]
            with about(self, name):
                if not -array.ndim <= self.axis < array.ndim:
                    raise CheckpointError(f"it has no axis {self.axis}")
                count = array.shape[self.axis]
                if count > _MOST or (last is not None and count != last - first + 1):
                    raise CheckpointError(f"it contains {count} arrays")
                parts = array.unstack(self.axis)
            numbers = range(first, first + len(parts))
            names = [new.format({**captures, self.over: str(number)}) for number in numbers]
            yield Change([name], list(zip(names, parts, strict=True)))

    def inverse(self) -> Rule:
        """Returns the rule that stacks them."""
        return Stack(self.to, self.from_, self.over, self.axis)


def _is_number(text: str) -> bool:
    return len(text) < 10 and text.isascii() and text.isdigit() and str(int(text)) == text


def _check_over(rule: Rule, many: str, one: str, over: str) -> None:
    same_captures(rule, (many, one), over)
    if over not in pattern(many).captures or not over or over in pattern(one).captures:
        raise CheckpointError(f"{rule}: {{{over}}} must occur in {many!r} and not in {one!r}")
