"""The interface of rules, and the matching of names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import CheckpointError
from fmapper.tree.pattern import pattern

Names: TypeAlias = str | Sequence[str]
Arrays: TypeAlias = Mapping[str, LazyArray]


class Change(NamedTuple):
    """A replacement of some arrays by others.

    Attributes:
        names: The names of the arrays to remove; the new ones take the place of the first.
        arrays: The new arrays by name.
    """

    names: Sequence[str]
    arrays: Sequence[tuple[str, LazyArray]]


class Rule:
    """One step of `Rules`. Its fields are its keys in TOML."""

    do: ClassVar[str]
    of_names: ClassVar[bool] = False  # whether it applies to numbers and texts, too

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields the changes that the rule makes to the arrays it matches."""
        raise NotImplementedError

    def inverse(self) -> Rule:
        """Returns the rule that undoes this one.

        Raises:
            CheckpointError: The rule has no inverse.
        """
        raise CheckpointError(f"{self} has no inverse: {self._lost}")

    _lost: ClassVar[str] = ""

    def fields(self) -> dict[str, Any]:
        """Returns the fields that differ from the defaults, by their TOML names."""
        fields = {}
        for place in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, place.name)
            if value != place.default:
                fields[place.name.rstrip("_")] = list(value) if type(value) is tuple else value
        return fields

    def __str__(self) -> str:
        """Returns the rule as Python code."""
        shown = []
        for place in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, place.name)
            if value != place.default:
                value = list(value) if type(value) is tuple else value
                shown.append(repr(value) if place.name in _FIRST else f"{place.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    __repr__ = __str__


_FIRST = ("from_", "to", "names", "name")


def names_of(value: Names) -> tuple[str, ...]:
    """Normalises one name or several to a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def one_or_several(value: Names) -> Names:
    """Normalises several names to a tuple, so that rules from TOML equal other rules."""
    return value if isinstance(value, str) else tuple(value)


def same_captures(rule: Rule, names: Iterable[str], over: str = "") -> None:
    """Checks that patterns have the same captures, so that each name determines the other.

    Raises:
        CheckpointError: The captures differ, or a name is not a pattern.
    """
    wanted = None
    for name in names:
        captures = {*pattern(name).captures}
        if "" in captures:
            raise CheckpointError(f"{rule}: write {{name...}} in place of the star in {name!r}")
        captures -= {over}
        wanted = captures if wanted is None else wanted
        if captures != wanted:
            raise CheckpointError(f"{rule}: {name!r} does not have the captures of the other side")


def matches(text: str, arrays: Collection[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the names that match a pattern, and the captures of each."""
    compiled = pattern(text)
    if not compiled.captures:  # no other name can match
        name = compiled.format({})
        if name in arrays:
            yield name, {}
        return
    longest = max((item for item in compiled.items if isinstance(item, str)), key=len, default="")
    for name in [name for name in arrays if longest in name]:
        captures = compiled.match(name)
        if captures is not None:
            yield name, captures


def groups(
    rule: Rule, names: Sequence[str], arrays: Arrays
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yields captures and the names that the patterns form with them, all of which exist.

    Raises:
        CheckpointError: A name does not exist.
    """
    done = set()
    for template in names:
        for name, captures in matches(template, arrays):
            if tuple(sorted(captures.items())) in done:
                continue
            done.add(tuple(sorted(captures.items())))
            members = [pattern(other).format(captures) for other in names]
            for other in members:
                if other not in arrays:
                    raise CheckpointError(f"{rule}: there is {name}, but no {other}")
            yield captures, members


@contextlib.contextmanager
def about(rule: Rule, name: str) -> Iterator[None]:
    """Adds rule and array to an error about shapes or dtypes."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}, in {rule}") from None


@dataclasses.dataclass(frozen=True, repr=False)
class OnEach(Rule):
    """A rule that changes arrays one by one.

    Attributes:
        names: Their names, as a pattern or several.
    """

    names: Names

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", one_or_several(self.names))
        for name in names_of(self.names):
            pattern(name)

    def changes(self, arrays: Arrays) -> Iterator[Change]:
        """Yields each array whose name matches, changed."""
        for name in dict.fromkeys(
            n for text in names_of(self.names) for n, _ in matches(text, arrays)
        ):
            with about(self, name):
                yield Change([name], [(name, self.change(arrays[name], name))])

    def change(self, array: LazyArray, name: str) -> LazyArray:
        """Returns the array changed."""
        raise NotImplementedError
