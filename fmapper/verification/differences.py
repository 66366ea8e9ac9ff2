"""Differences between the arrays of two structures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from fmapper.backends.discovery import adapter_of
from fmapper.backends.equality import equals, narrow_ends
from fmapper.states.matching import match, parts_of, path_of
from fmapper.verification.arrays import HALVES, UNITS, dtype_of, to_host, widen

# The allowed ratio of a model's distance from another to that from itself after a rounding.
OWN = 4.0


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between an array of `b` and that of `a`.

    Attributes:
        path: Its path in the output, its parameter, or the operation that returns it.
        error: The largest difference of two elements; infinite if shapes, NaN or infinite elements
            do not agree.
        scale: The largest finite element of `a`, by absolute value.
        allowed: The difference that is allowed.
        note: Further disagreements.
        size: The number of elements that were compared, without those that are NaN in both.
        precision: The precision in which both were computed, if it is not that of the models.
    """

    path: str
    error: float
    scale: float
    allowed: float
    note: str = ""
    size: int = 1
    precision: str = ""

    @property
    def ok(self) -> bool:
        """Whether the difference is allowed."""
        return not self.note and self.error <= self.allowed

    @property
    def share(self) -> float:
        """The difference relative to the largest element; infinite if something else differs."""
        if self.note:
            return math.inf
        return self.error / self.scale if self.scale else self.error

    def __str__(self) -> str:
        if self.note:
            return f"{self.path}: {self.note}"
        sign = "<=" if self.ok else ">"
        where = f" in {self.precision}" if self.precision else ""
        return f"{self.path}: differs by {self.error:.2e} {sign} {self.allowed:.2e}{where}"


@dataclass(frozen=True, slots=True)
class Pair:
    """An array of `a` and its counterpart in `b`, as NumPy arrays; or why there is none.

    Attributes:
        path: Its path in `a`.
        x: The array of `a`.
        y: The array of `b`.
        note: Why they cannot be compared.
        other: Its path in `b`.
    """

    path: str
    x: Any = None
    y: Any = None
    note: str = ""
    other: str = ""


def pairs_of(
    a: Any, b: Any, path: str = "output", other: str = "output",
    around: Set[tuple[int, int]] = frozenset(),
) -> Iterator[Pair]:  # fmt: skip
    """Pairs the arrays of two structures by their contents, whatever their classes.

    Arrays in named parts are paired by name, in sequences by position.

    Args:
        a: An output, or a part of one.
        b: The other one.
        path: The path of the first.
        other: The path of the second.
        around: The ids of the structures that contain them, since these may be cyclic.
    """
    if (id(a), id(b)) in around:
        return
    if adapter_of(a) is not None or adapter_of(b) is not None:
        x, y = _as_array(a, b), _as_array(b, a)
        if adapter_of(x) is None or adapter_of(y) is None:
            yield Pair(path, note=f"{type(x).__name__} and {type(y).__name__}", other=other)
        else:
            yield Pair(path, to_host(x), to_host(y), other=other)
        return
    matches = match(a, b)
    if matches is None:
        if not equals(a, b) and a != b:
            yield Pair(path, note=f"{a!r} and {b!r}", other=other)
    elif isinstance(matches, str):
        yield Pair(path, note=matches, other=other)
    else:
        keys = parts_of(b) or {}
        named = all(key in keys for key, _, _ in matches)
        for key, (name, value, theirs) in zip(keys, matches, strict=False):
            inner = {*around, (id(a), id(b))}
            place = path_of(other, name if named else key)
            yield from pairs_of(value, theirs, path_of(path, name), place, inner)


def _as_array(x: Any, other: Any) -> Any:
    """Returns a number as an array if the other is an array without dimensions."""
    import numpy as np

    is_scalar = isinstance(x, bool | int | float | complex) and getattr(other, "shape", None) == ()
    return np.asarray(x) if is_scalar else x


def plain_values(x: Any, path: str, around: Set[int] = frozenset()) -> Iterator[Difference]:
    """Yields the numbers and strings of an output without arrays."""
    if id(x) in around:
        return
    parts = parts_of(x)
    if parts is None and x is not None:
        yield Difference(path, 0.0, 0.0, 0.0)
    for key, value in (parts or {}).items():
        yield from plain_values(value, path_of(path, key), {*around, id(x)})


@dataclass(frozen=True, slots=True)
class Bounds:
    """The difference that is allowed.

    Attributes:
        rtol: Relative to the largest element; None for `units` roundings of the coarser dtype.
        atol: An absolute difference.
        units: The number of roundings.
        own: Path -> a difference that is allowed because it was measured.
        least: The minimal scale of arrays.
    """

    rtol: float | None = None
    atol: float = 0.0
    units: float = 8.0
    own: Mapping[str, float] = field(default_factory=dict)
    least: float = 0.0

    def allow(self, path: str, scale: float, dtype: str) -> float:
        """Returns the allowed difference of an array."""
        scale = max(scale, self.least)
        if self.rtol is not None:
            return self.rtol * scale + self.atol
        rounding = self.units * UNITS.get(dtype, 0.0) * scale
        return max(rounding, self.own.get(path, 0.0)) + self.atol


class _Converted(Bounds):
    """Bounds of converted models, whose compilers fuse operations and reorder sums.

    They cannot be measured, because such a model computes only in the dtypes of its program; nor
    can those of a function that is not a framework's model.
    """

    def allow(self, path: str, scale: float, dtype: str) -> float:
        rounding = {"float64": 1e-10, "complex128": 1e-10, "float32": 1e-4, "complex64": 1e-4,
                    "float16": 1e-2, "bfloat16": 5e-2}  # fmt: skip
        allowed = Bounds.allow(self, path, scale, dtype)
        return max(allowed, rounding.get(dtype, 0.0) * scale) if self.rtol is None else allowed


CONVERTED = _Converted()


def difference(pair: Pair, bounds: Bounds, precision: str = "") -> Difference:
    """Compares a pair of arrays."""
    if pair.note:
        return Difference(pair.path, math.inf, 0.0, 0.0, pair.note)
    error, scale, dtype, note = measure(pair.x, pair.y)
    allowed = bounds.allow(pair.path, scale, dtype)
    return Difference(pair.path, error, scale, allowed, note, _numbers_in(pair.x), precision)


def _numbers_in(x: Any) -> int:
    """Returns how many elements are not NaN, because two NaNs say nothing about each other."""
    import numpy as np

    return int(x.size - np.isnan(widen(x)).sum()) if dtype_of(x) in UNITS else int(x.size)


def measure(x: Any, y: Any) -> tuple[float, float, str, str]:
    """Returns the largest difference and element, the coarser dtype, and other differences."""
    import numpy as np

    dtype = max(dtype_of(x), dtype_of(y), key=lambda name: UNITS.get(name, 0.0))
    if x.shape != y.shape:
        return math.inf, 0.0, dtype, f"shape {x.shape} and {y.shape}"
    if not x.size:
        return 0.0, 0.0, dtype, ""
    if dtype not in UNITS:  # integers and bools; int64 may be int32 in JAX
        wrong = int((narrow_ends(x, y) != narrow_ends(y, x)).sum())
        return 0.0, 0.0, dtype, f"{wrong} of {x.size} elements are not equal" if wrong else ""
    wide = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(y) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    finite = np.isfinite(x)
    scale = float(np.abs(x[finite]).max()) if finite.any() else 0.0
    if (np.isnan(x) != np.isnan(y)).any():
        return math.inf, scale, dtype, "NaN at other places"
    special = ~finite & ~np.isnan(x)
    if (x[special] != y[special]).any() or not np.isfinite(y[finite]).all():
        return math.inf, scale, dtype, "infinite at other places"
    error = float(np.abs(x[finite] - y[finite]).max()) if finite.any() else 0.0
    return error, scale, dtype, ""


def distances(a: Any, b: Any) -> dict[str, float]:
    """Maps paths to the largest differences between the arrays of two outputs of one model."""
    return {p.path: math.inf if p.note else _distance(p.x, p.y) for p in pairs_of(a, b)}


def _distance(x: Any, y: Any) -> float:
    error, _, _, note = measure(x, y)
    return math.inf if note else error


def divergence(logits: Any, others: Any) -> float:
    """Returns the mean Kullback-Leibler divergence of the softmax of logits over the last axis."""
    import numpy as np

    def log_softmax(x: Any) -> Any:
        x = widen(x)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(logits), log_softmax(others)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.exp(p) > 0, np.exp(p) * (p - q), 0.0)
    return float(np.maximum(terms.sum(-1), 0).mean())


def differ_in_halves(pair: Pair) -> bool:
    """Returns whether exactly one of the arrays is of half precision."""
    if pair.note:
        return False
    ours, theirs = dtype_of(pair.x), dtype_of(pair.y)
    return (ours in HALVES) != (theirs in HALVES) and ours in UNITS and theirs in UNITS
