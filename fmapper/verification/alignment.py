"""Aligns two recorded runs by value: pairs results that hold the same numbers.

The names of modules and operations may differ, and so may the division of a computation into
operations: a fused norm has the same result as the last operation of an unfused one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fmapper.backends.compute import Observation
from fmapper.backends.discovery import adapter_of
from fmapper.verification.arrays import UNITS, dtype_of, to_host, widen

INPUT, WEIGHT = "input", "weight"  # the operations of observations that are not results


@dataclass(frozen=True, slots=True)
class Alignment:
    """Two runs, with their results paired.

    Attributes:
        a: The observations of the first run, in order.
        b: The observations of the second run, in order.
        partners: For each observation of `a`, the indices of those of `b` with the same values up
            to layout, the best first.
        sources: For each observation of `b`, the indices of those of `a`; empty if one of its
            results has no partner.
    """

    a: Sequence[Observation]
    b: Sequence[Observation]
    partners: Sequence[Sequence[int]]
    sources: Sequence[Sequence[int]]

    def first_apart(
        self, ends: Sequence[Any] = (), other_ends: Sequence[Any] = ()
    ) -> tuple[int | None, int | None]:
        """Returns the indices of the operations of `a` and of `b` where the runs first part.

        The operands of such an operation have partners, its result has none, nor has any result
        that depends on it. None for a run without such an operation.

        Args:
            ends: Wrong results of `a`; if empty, all that are not operands.
            other_ends: Those of `b`.
        """
        ours = _frontier(self.a, self.partners, ends)
        theirs = _frontier(self.b, self.sources, other_ends)
        for k in ours.constants:
            for other in theirs.constants:
                if self._may_be_same(k, other):  # both have a constant there, such as a mask
                    return self._first_constants(k, other)
        if ours.place is None or theirs.place is None:
            return ours.place, theirs.place
        change = _find_change(
            self.b, self.sources, theirs, _partners_of_operands(self.a, ours.place, self.partners)
        )
        if change is not None:
            return ours.place, change
        change = _find_change(
            self.a, self.partners, ours, _partners_of_operands(self.b, theirs.place, self.sources)
        )
        if change is not None:
            return change, theirs.place
        return self._first_reordering(ours.place, theirs.place) or (ours.place, theirs.place)

    def _first_reordering(self, ours: int, theirs: int) -> tuple[int, int] | None:
        """Returns the operations that first order an operand of two others differently.

        None if there is no such operand, or more than one: then the layout of weights may be the
        reason.
        """
        operands = _operands(self.b, theirs)
        pairs = [
            (i, k)
            for i in _operands(self.a, ours)
            for k in self.partners[i]
            if k in operands and _are_reordered(self.a[i], self.b[k])
        ]
        if len(pairs) != 1:
            return None
        ((i, k),) = pairs
        return (
            _first_of_order(self.a, self.partners, self.b, i),
            _first_of_order(self.b, self.sources, self.a, k),
        )

    def forms_apart(
        self, ends: Sequence[Any], other_ends: Sequence[Any]
    ) -> tuple[int | None, int | None]:
        """Returns the operations of `a` and of `b` that give the same elements different forms.

        Args:
            ends: Results of `a` that differ only in form.
            other_ends: Those of `b`.
        """
        ours = _last_form(self.a, self.partners, self.b, ends)
        return ours, _last_form(self.b, self.sources, self.a, other_ends)

    def _may_be_same(self, k: int, other: int) -> bool:
        """Returns whether two different constants may be equivalent.

        Masks may be repeated along dimensions.
        """
        a, b = self.a[k], self.b[other]
        return _kind(a) == _kind(b) and (_kind(a) == "bool" or _size(a) == _size(b))

    def _first_constants(self, k: int, other: int) -> tuple[int, int]:
        """Returns the first constants from which two others are computed, if each has one.

        Masks that are made in different ways are computed from different constants; then only those
        that are masks, too, are considered.
        """
        for alike in (False, True):
            ours = _roots(self.a, self.partners, k, alike=alike)
            theirs = _roots(self.b, self.sources, other, alike=alike)
            if len(ours) == len(theirs) == 1 and self._may_be_same(ours[0], theirs[0]):
                return ours[0], theirs[0]
        return k, other

    def takes_table(self, ends: Sequence[Any] = (), other_ends: Sequence[Any] = ()) -> bool:
        """Returns whether a parting operation takes floating constants without a partner."""
        ours = _frontier(self.a, self.partners, ends)
        theirs = _frontier(self.b, self.sources, other_ends)
        kinds = [_kind(self.a[k]) for k in ours.constants]
        return "float" in [*kinds, *(_kind(self.b[k]) for k in theirs.constants)]


@dataclass(slots=True)
class _Print:
    """The sorted values of an array, and numbers by which candidates are found.

    `body` is the largest element apart from a value that occurs often, such as that of masked
    elements.
    """

    values: Any
    scale: float
    body: float
    mean: float
    size: float
    key: tuple[Any, ...]
    shape: tuple[int, ...]
    array: Any = field(repr=False)


def align(
    a: Iterable[Observation], b: Iterable[Observation], tolerance: Sequence[float] | float
) -> Alignment:
    """Aligns two runs.

    Args:
        a: A run, as returned by `Models.watch`.
        b: Another one.
        tolerance: The largest difference of equal results, relative to the largest element; a
            number for each observation of `a`, or one for all.
    """
    runs = [*a], [*b]
    ours, theirs = ([list(map(_print, operation.values)) for operation in run] for run in runs)
    limits = [tolerance] * len(ours) if isinstance(tolerance, float | int) else tolerance
    index: dict[tuple[Any, ...], list[tuple[int, _Print]]] = {}
    for number, prints in enumerate(theirs):
        for print_ in prints:
            if print_ is not None:
                index.setdefault(print_.key, []).append((number, print_))
    tables = {key: _table(entries) for key, entries in index.items()}
    partners: list[list[int]] = []
    sources: list[list[int]] = [[] for _ in theirs]
    matched: set[int] = set()
    for number, (prints, limit) in enumerate(zip(ours, limits, strict=True)):
        matches: list[tuple[int, int]] | None = None
        for print_ in prints:
            if print_ is None:
                continue
            hits = _same(print_, index.get(print_.key, []), tables.get(print_.key), limit)
            matched.update(id(other) for _, _, other in hits)
            same = [(other, layout) for other, layout, _ in hits]
            matches = same if matches is None else matches  # the first result represents the others
            matches = matches if same else []
        ranked = sorted(matches or [], key=lambda at: (at[1], abs(at[0] - number)))
        partners.append([other for other, _ in ranked])
        for other, _ in ranked:
            sources[other].append(number)
    for number, prints in enumerate(theirs):
        if not all(print_ is None or id(print_) in matched for print_ in prints):
            sources[number].clear()
    return Alignment(*runs, partners, sources)


def _print(array: Any) -> _Print | None:
    """Returns the print of an array; None if its values are unknown."""
    import numpy as np

    adapter = adapter_of(array)
    if adapter is None or adapter.is_traced(array):
        return None
    array = to_host(array)
    if not array.size:
        return None
    if array.dtype.kind == "b" and _is_mostly_true(array):
        array = ~array  # masks and their complements are equivalent
    if dtype_of(array) not in UNITS:
        values = np.sort(array, axis=None)
        flat = values.astype(np.float64)
        kind = "bool" if array.dtype.kind == "b" else "int"
        return _Print(values, 0.0, 0.0, float(flat.mean()), float(np.abs(flat).mean()),
                      (kind, array.size), array.shape, array)  # fmt: skip
    wide = widen(array)
    flat = np.sort(np.concatenate([wide.real.ravel(), wide.imag.ravel()])
                   if np.iscomplexobj(wide) else wide, axis=None)  # fmt: skip
    finite = flat[np.isfinite(flat)]
    scale = float(np.abs(finite).max(initial=0.0))
    shares = finite / (scale or 1.0)  # a mask may hold the largest numbers of its dtype
    mean = scale * float(shares.mean()) if finite.size else 0.0
    size = scale * float(np.abs(shares).mean()) if finite.size else 0.0
    special = (int(np.isnan(flat).sum()), int(np.isposinf(flat).sum()))
    key = ("float", flat.size, finite.size, *special)
    sizes = np.abs(finite)
    is_largest = sizes == scale
    body = float(sizes[~is_largest].max(initial=0.0)) if is_largest.sum() > 1 else scale
    return _Print(flat, scale, body or scale, mean, size, key, array.shape, wide)


def _is_mostly_true(array: Any) -> bool:
    twice = 2 * int(array.sum())
    return bool(twice > array.size or (twice == array.size and array.flat[0]))


def _table(entries: Sequence[tuple[int, _Print]]) -> Any:
    import numpy as np

    return np.array([[print_.mean, print_.size, print_.scale] for _, print_ in entries])


def _same(
    print_: _Print, candidates: Sequence[tuple[int, _Print]], table: Any, limit: float
) -> list[tuple[int, int, _Print]]:
    """Returns the candidates with the same values, each with a rank of its layout, 0 if equal."""
    import numpy as np

    if table is None:
        return []
    allowed = limit * print_.scale
    with np.errstate(over="ignore"):
        near = (np.abs(table - [print_.mean, print_.size, print_.scale]) <= allowed + 1e-300).all(1)
    matches = []
    for at in np.flatnonzero(near):
        number, other = candidates[int(at)]
        tolerance = limit * print_.body
        if other.values is not print_.values and not _near(print_.values, other.values, tolerance):
            continue
        alike = print_.shape == other.shape and _near(print_.array, other.array, tolerance)
        matches.append((number, 0 if alike else 1, other))
    return matches


def _near(x: Any, y: Any, allowed: float) -> bool:
    import numpy as np

    if x.dtype.kind in "biu":
        return bool((x == y).all())
    with np.errstate(invalid="ignore", over="ignore"):
        distances = np.abs(x - y)
    distances = distances[np.isfinite(x) & np.isfinite(y)]
    return bool((distances <= allowed).all()) and bool((np.isfinite(x) == np.isfinite(y)).all())


@dataclass(frozen=True, slots=True)
class _Frontier:
    """The first operation without a partner, and its constants without one."""

    place: int | None
    constants: Sequence[int] = ()


def _frontier(
    run: Sequence[Observation], partners: Sequence[Sequence[int]], wrong: Sequence[Any]
) -> _Frontier:
    """Returns the first operation without a partner whose operands all have one.

    Only operations count that are connected by results without partners to the end of the run.
    Those that depend on inputs come before constants, such as masks, which the two runs may compute
    differently.
    """
    numbers = {operation.name: i for i, operation in enumerate(run) if operation.name}
    operands = [
        [numbers[name] for name in operation.operands if name in numbers] for operation in run
    ]
    is_open = [
        not partners[i] and bool(operation.values) and operation.op not in (INPUT, WEIGHT)
        for i, operation in enumerate(run)
    ]
    used = {i for at, inputs in enumerate(operands) for i in inputs if at != i}
    ends = [i for i in _places(run, wrong) if is_open[i]]
    ends = ends or [i for i in range(len(run)) if i not in used and is_open[i]]
    depends = [False] * len(run)
    for i, operation in enumerate(run):
        depends[i] = operation.op == INPUT or any(depends[k] for k in operands[i] if k < i)
    reached, todo = set(ends), list(ends)
    while todo:
        for k in operands[todo.pop()]:
            passes = is_open[k] or not run[k].values  # unobserved results are skipped
            if passes and k not in reached:
                reached.add(k)
                todo.append(k)
    places = sorted(i for i in reached if is_open[i])
    for i in places:
        if depends[i] and not any(k in reached and depends[k] for k in operands[i]):
            constants = [k for k in operands[i] if not depends[k] and not partners[k]]
            return _Frontier(i, [k for k in constants if run[k].values and _has_place(run[k])])
    first = [i for i in places if not any(k in reached for k in operands[i])]
    return _Frontier(first[0] if first else None)


def _partners_of_operands(
    run: Sequence[Observation], at: int, partners: Sequence[Sequence[int]]
) -> frozenset[int]:
    """Returns the partners of the operands of an operation."""
    names = set(run[at].operands)
    return frozenset(
        k
        for operation, group in zip(run, partners, strict=True)
        if operation.name in names
        for k in group
    )


def _find_change(
    run: Sequence[Observation], partners: Sequence[Sequence[int]], frontier: _Frontier,
    taken: frozenset[int],
) -> int | None:  # fmt: skip
    """Returns the operation that changes a constant which the other run uses unchanged."""
    numbers = {operation.name: i for i, operation in enumerate(run) if operation.name}
    todo, visited = [*frontier.constants], set(frontier.constants)
    while todo:
        k = todo.pop(0)
        operands = {numbers[name] for name in run[k].operands if name in numbers} - {k}
        if any(not _repeats(run[k], run[i]) for i in operands & taken):
            return k
        before = operands - taken - visited
        todo += [i for i in before if not partners[i] and run[i].values]
        visited |= before
    return None


def _repeats(result: Observation, other: Observation) -> bool:
    """Returns whether a result repeats all elements of another equally often."""
    import numpy as np

    (a, often), (b, others) = (
        np.unique(to_host(observation.values[0]), return_counts=True)
        for observation in (result, other)
    )
    if a.shape != b.shape or not bool((a == b).all()):
        return False
    return bool((often * others.sum() == others * often.sum()).all())


def _operands(run: Sequence[Observation], at: int) -> list[int]:
    """Returns the operands of an operation that are results, not inputs or weights."""
    names = set(run[at].operands)
    ops = (INPUT, WEIGHT)
    return [
        i
        for i, observation in enumerate(run)
        if observation.name in names and observation.op not in ops and i != at
    ]


def _first_of_order(
    run: Sequence[Observation], partners: Sequence[Sequence[int]], other: Sequence[Observation],
    at: int,
) -> int:  # fmt: skip
    """Returns the first operation whose result is in another order than in the other run."""
    while True:
        before = [
            i
            for i in _operands(run, at)
            if i < at and partners[i] and all(_are_reordered(run[i], other[k]) for k in partners[i])
        ]
        if len(before) != 1:
            return at
        at = before[0]


def _are_reordered(result: Observation, other: Observation) -> bool:
    """Returns whether two results have the same elements but are equal in no order of the axes."""
    import numpy as np

    is_known = False
    for pair in itertools.product(result.values, other.values):
        x, y = (np.squeeze(widen(to_host(value))) for value in pair)
        if x.ndim > _MOST_AXES or sorted(x.shape) != sorted(y.shape):
            continue
        allowed = _SAME * float(np.abs(x[np.isfinite(x)] * 1.0).max(initial=0.0))
        if not _near(np.sort(x, axis=None), np.sort(y, axis=None), allowed):
            continue
        is_known = True
        for axes in itertools.permutations(range(x.ndim)):
            turned = x.transpose(axes)
            if turned.shape == y.shape and _near(turned, y, allowed):
                return False
    return is_known


_MOST_AXES = 6  # more axes have thousands of orders


def _last_form(
    run: Sequence[Observation], partners: Sequence[Sequence[int]], other: Sequence[Observation],
    ends: Sequence[Any],
) -> int | None:  # fmt: skip
    """Returns the operation that forms a wrong result, if the other run has its operands."""
    numbers = {operation.name: i for i, operation in enumerate(run) if operation.name}
    at = next(iter(_places(run, ends)), None)
    while at is not None:
        print_ = _print(run[at].values[0])
        before = None
        for name in run[at].operands:
            k = numbers.get(name, at)
            operand = _print(run[k].values[0]) if k != at and run[k].values else None
            if operand is None or print_ is None or operand.key != print_.key:
                continue
            if _near(operand.values, print_.values, 0.0):
                before = k
        if before is None or any(_form(other[i]) == _form(run[before]) for i in partners[before]):
            return at
        at = before
    return None


def _form(result: Observation) -> tuple[Any, str]:
    return tuple(result.values[0].shape), dtype_of(result.values[0])


def _roots(
    run: Sequence[Observation], partners: Sequence[Sequence[int]], last: int, *, alike: bool
) -> Sequence[int]:
    """Returns the first results without partners that lead to a result; if `alike`, of its kind."""
    numbers = {operation.name: i for i, operation in enumerate(run) if operation.name}
    roots, reached, todo = [], {last}, [last]
    while todo:
        k = todo.pop()
        operands = [numbers[name] for name in run[k].operands if name in numbers]
        before = [i for i in operands if not partners[i] and run[i].values and i != k]
        before = [i for i in before if not alike or _kind(run[i]) == _kind(run[last])]
        if not before:
            roots.append(k)
        todo += [i for i in before if i not in reached]
        reached.update(before)
    return roots


def _has_place(result: Observation) -> bool:
    """Returns whether a result has a line of code, or a name among the arrays of the model."""
    return bool(result.source or result.module)


def _size(result: Observation) -> int:
    return int(math.prod(result.values[0].shape))


def _kind(result: Observation) -> str:
    """Returns the kind of numbers in a result: `float`, `bool` or `int`."""
    name = dtype_of(result.values[0])
    return "float" if name in UNITS else "bool" if name == "bool" else "int"


def _places(run: Sequence[Observation], arrays: Sequence[Any]) -> list[int]:
    """Returns the last observation of each array."""
    wanted = [print_ for print_ in map(_print, arrays) if print_ is not None]
    places = {}
    for i, operation in enumerate(run):
        for print_ in map(_print, operation.values) if wanted else ():
            for number, array in enumerate(wanted):
                if print_ is None or print_.key != array.key:
                    continue
                if _near(print_.values, array.values, _SAME * array.scale):
                    places[number] = i
    return list(places.values())


_SAME = 2.0**-20  # a watched run may round differently than a compiled one
