"""Equality of the constants of recorded programs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from fmapper.errors import UnsupportedLeafError
from fmapper.tree.nodes import CONTAINERS

_EXACT = frozenset({int, bool, str, bytes, type(None)})


def equals(a: Any, b: Any) -> bool:
    """Returns whether one constant may take the place of another in a program.

    They must be of one type, also inside containers: `True` is not `1`, `1` is not `1.0`. NaN
    equals NaN, and `0.0` is not `-0.0`. Dicts must have one order. Arrays must be of one dtype and
    shape and hold the same bits; one that has no values, such as a tracer, equals itself alone.
    Other objects are compared by identity, then by `==`; what cannot be compared differs.

    Examples:
        >>> import fmapper
        >>> fmapper.backends.equals({"rate": float("nan")}, {"rate": float("nan")})
        True
        >>> fmapper.backends.equals([1], [True]), fmapper.backends.equals(0.0, -0.0)
        (False, False)
    """
    if a is b:
        return True
    seen: set[tuple[int, int]] = set()
    todo = [(a, b)]
    while todo:
        mine, other = todo.pop()
        if mine is other:
            continue
        cls = type(mine)
        if cls is not type(other):
            return False
        if cls in _EXACT:
            if mine != other:
                return False
        elif issubclass(cls, set | frozenset):
            if set(map(_Member, mine)) != set(map(_Member, other)):
                return False
        elif issubclass(cls, CONTAINERS):
            if (id(mine), id(other)) in seen:
                continue
            seen.add((id(mine), id(other)))
            ours, theirs = list(_parts(mine)), list(_parts(other))
            if len(ours) != len(theirs):
                return False
            todo += zip(ours, theirs, strict=True)
        elif not _are_equal(mine, other):
            return False
    return True


def equal_arrays(a: Any, b: Any) -> bool:
    """Returns whether two arrays, of any backends, have one dtype and shape and the same bits.

    Raises:
        FmapperError: One of them has no values, as on the device meta.
    """
    if a is b:
        return True
    import numpy as np

    left, right = _on_host(a), _on_host(b)
    if left.dtype != right.dtype or left.shape != right.shape or left.dtype.hasobject:
        return False
    ours, theirs = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (left, right))
    return np.array_equal(ours, theirs)


def _on_host(array: Any) -> Any:
    """Returns the values of an array as a NumPy array."""
    from fmapper.backends.arrays import HOST
    from fmapper.backends.discovery import adapter_of

    adapter = adapter_of(array)
    if adapter is None:
        raise UnsupportedLeafError(f"an object of type {type(array).__name__} is not an array.")
    try:
        adapter.check(array)
        return adapter.export([adapter.portable(array)], HOST).data[0]
    except TypeError as error:
        raise UnsupportedLeafError(f"an array cannot be compared: {error}") from error


def digest(value: Any) -> int:
    """Hashes a constant; constants that are equal have equal hashes."""
    cls: type = type(value)
    if cls in _EXACT or issubclass(cls, float | complex):
        return hash((cls, _exact(value)))
    if issubclass(cls, dict):
        return hash((cls, *map(_brief, dict.keys(value)), *map(_brief, dict.values(value))))
    if issubclass(cls, set | frozenset):
        return hash((cls, len(value)))
    return hash((cls, *map(_brief, value))) if issubclass(cls, CONTAINERS) else hash(cls)


def _brief(part: Any) -> int:
    """Hashes a value without entering containers, which may be deep or cyclic."""
    return hash(type(part)) if isinstance(part, CONTAINERS) else digest(part)


def _exact(value: Any) -> Any:
    """Spells out a number that `==` cannot distinguish: NaN, or a signed zero."""
    if isinstance(value, float):
        return float.__repr__(value)
    return complex.__repr__(value) if isinstance(value, complex) else value


class _Member:
    """A member of a set, found by `equals`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Member) and equals(self.value, other.value)

    def __hash__(self) -> int:
        return digest(self.value)


def _are_equal(a: Any, b: Any) -> bool:
    """Compares two objects of one type that are not containers."""
    if isinstance(a, float | complex):
        return bool(_exact(a) == _exact(b))
    from fmapper.backends.discovery import adapter_of

    try:
        if adapter_of(a) is not None:
            return _holds_values(a) and _holds_values(b) and equal_arrays(a, b)
        return bool(a == b)
    except Exception:  # `==` of a user's class may raise anything
        return False


def _holds_values(array: Any) -> bool:
    from fmapper.backends.discovery import adapter_of

    adapter = adapter_of(array)
    return adapter is not None and not adapter.is_traced(array)


def _parts(container: Any) -> Iterator[Any]:
    """Yields in order the parts in which two containers of one type must agree."""
    if isinstance(container, dict):
        yield from dict.keys(container)
        yield from dict.values(container)
    else:
        native: Any = next(base for base in CONTAINERS if isinstance(container, base))
        yield from native.__iter__(container)
    attributes = getattr(container, "__dict__", None)
    if attributes and attributes is not container:
        yield attributes
    if isinstance(container, defaultdict):
        yield container.default_factory
    if isinstance(container, deque):
        yield container.maxlen


def narrow_ends(array: Any, other: Any) -> Any:
    """Replaces the limits of int64 by those of int32 where the other array has 32 bits.

    Many programs use them as infinity, and JAX without 64 bits has the narrower ones.
    """
    import numpy as np

    narrow = array.dtype.kind == other.dtype.kind in "iu"
    if not (narrow and array.itemsize == 8 and other.itemsize == 4):
        return array
    ends, new = np.iinfo(array.dtype), np.iinfo(other.dtype)
    at_least = np.where(array == ends.min, new.min, array)
    return np.where(array == ends.max, new.max, at_least)
