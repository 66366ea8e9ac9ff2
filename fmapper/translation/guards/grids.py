"""Conditions that are tried for many sizes: those that always hold, or from a size on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fmapper.programs.program import Guard
from fmapper.programs.sizes import size_of

_PLAIN = re.compile(r"(?:[Mm]od\()?([A-Za-z_]\w*)(?:, \d+\))?")
_MOST_NAMES = 2
_LARGEST_NUMBER = 300  # in a condition; what it says for sizes far beyond its numbers is regular
_LEAST_TRIED = 30
_FAR = (10**4, 10**5)
_FEW = (0, 1, 2, 3, 5, 8, 64)  # of a second size


def solve(guards: Sequence[Guard]) -> list[Guard]:
    """Returns conditions without those that others on single sizes imply, others as `n >= 27`.

    Examples:
        >>> odd = Guard("mod(n, 2)", "!=", 0)
        >>> solve([odd, Guard("2*((n - 1)//2) - n", "==", -1)]) == [odd]
        True
        >>> solve([Guard("n - mod(n, 3)", ">=", 27)])
        [Guard(expression='n', relation='>=', value=27, question='')]
    """
    plain = [one for one in guards if _PLAIN.fullmatch(one.expression)]
    found: list[Guard] = []
    for guard in guards:
        found += [guard] if guard in plain else _solve(guard, plain)
    least = {one.expression: one.value for one in _by_value(found)}
    return [
        one
        for at, one in enumerate(found)
        if one.relation != ">="
        or not one.expression.isidentifier()
        or (least[one.expression] == one.value and one not in found[:at])
    ]


def _by_value(guards: Sequence[Guard]) -> list[Guard]:
    several = [one for one in guards if one.relation == ">=" and one.expression.isidentifier()]
    return sorted(several, key=lambda one: one.value)


def _solve(guard: Guard, plain: Sequence[Guard]) -> list[Guard]:
    names = sorted({*re.findall(r"[A-Za-z_]\w*(?!\w*\()", guard.expression)})
    numbers = [abs(guard.value), *map(int, re.findall(r"\b\d+\b", guard.expression))]
    if not 1 <= len(names) <= _MOST_NAMES or max(numbers) > _LARGEST_NUMBER:
        return [guard]
    of_name = [(one, _PLAIN.fullmatch(one.expression)) for one in plain]
    known = {name: [one for one, found in of_name if found and found[1] == name] for name in names}
    tried = [*_points(names, known, 4 * max(numbers) + 200)]
    values = [size_of(guard.expression, dict(zip(names, one, strict=True))) for one in tried]
    if len(tried) < _LEAST_TRIED or None in values:
        return [guard]
    holds = [replace(guard, expression=str(value)).holds({}) for value in values]
    if all(holds):
        return []
    first = holds.index(True) if True in holds else 0
    if len(names) == 1 and guard.relation in (">=", "<=") and first and all(holds[first:]):
        return [Guard(names[0], ">=", tried[first][0])]
    return [guard]


def _points(
    names: Sequence[str], known: dict[str, list[Guard]], end: int
) -> Iterator[tuple[int, ...]]:
    """Yields sizes that meet the conditions on single ones, all that are small and some others."""
    many = [*range(end), *(far + n for far in _FAR for n in range(64))]
    each = {
        name: [n for n in many if all(one.holds({name: n}) for one in known[name])]
        for name in names
    }
    few = {name: [n for n in each[name] if n in _FEW] or each[name][:3] for name in names}
    if len(names) == 1:
        yield from ((n,) for n in each[names[0]])
        return
    first, second = names
    yield from itertools.product(each[first], few[second])
    yield from itertools.product(few[first], each[second])
