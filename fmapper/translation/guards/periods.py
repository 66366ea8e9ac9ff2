"""Conditions on sizes that others on single sizes imply, and those that hold from a size on.

Sums of sizes with floor divisions and rests by numbers grow by the same number in each period, and
products of such sums of different sizes in proportion to each. What holds in one period, and does
not grow towards its bound, therefore holds for all that follow.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fmapper.programs.program import RELATIONS, Guard
from fmapper.programs.sizes import size_of
from fmapper.translation.code import text
from fmapper.translation.guards.expressions import parse

_PLAIN = re.compile(r"([A-Za-z_]\w*)|[Mm]od\(([A-Za-z_]\w*)(?: [+-] \d+)?, (\d+)\)")
_MOST_NAMES = 2
_MOST = 10_000  # sizes that are tried


def solve(guards: Sequence[Guard]) -> list[Guard]:
    """Returns conditions without those that others on single sizes imply, others as `n >= 27`.

    Examples:
        >>> odd = Guard("mod(n, 2)", "!=", 0)
        >>> solve([odd, Guard("2*((n - 1)//2) - n", "==", -1)]) == [odd]
        True
        >>> solve([Guard("n - mod(n, 3)", ">=", 27)])
        [Guard(expression='n', relation='>=', value=27, question='')]
        >>> odd = [Guard(f"mod((n - 1) // {k}, 2)", "==", 1) for k in (2, 4)]
        >>> solve(odd)  # as 31, 32, 39 and 40 are
        [Guard(expression='mod(n + 1, 8)', relation='<=', value=1, question='')]
    """
    guards = _join_rests(guards)
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
    node = _Simplify(plain).visit(parse(guard.expression))
    names = sorted({one.id for one in ast.walk(node) if isinstance(one, ast.Name)})
    allowed = _Allowed(names, plain)
    period = math.lcm(_period(node), allowed.period)
    if not period or len(names) > _MOST_NAMES or period ** len(names) > _MOST:
        return [guard]
    simpler = replace(guard, expression=text(node))
    if _holds_from(simpler, allowed, allowed.begin, period):
        return []
    least = _first(simpler, allowed, names[0], period) if len(names) == 1 else None
    if len(names) > 1 and guard.relation == ">=":
        some = [one for one in names if _needs(simpler, allowed, one, period)]
        begin = {one: max(allowed.begin[one], one in some) for one in names}
        if some and _holds_from(simpler, allowed, begin, period):
            return [Guard(one, ">=", 1) for one in some]
    return [guard if least is None else Guard(names[0], ">=", least)]


def _needs(guard: Guard, allowed: _Allowed, name: str, period: int) -> bool:
    """Returns whether a condition, as one on a product, holds for no others where a size is 0."""
    none = re.sub(rf"\b{name}\b", "0", guard.expression)
    begin = {one: first for one, first in allowed.begin.items() if one != name}
    return _holds_from(Guard(none, "<=", guard.value - 1), allowed, begin, period)


def _join_rests(guards: Sequence[Guard]) -> Sequence[Guard]:
    """Returns conditions with one for those that allow neighbouring rests of a size."""
    rests: dict[str, dict[Guard, int]] = {}  # sizes -> the conditions on their rests, and periods
    for one in guards:
        node = parse(one.expression)
        names, period = sorted(_names(node)), _period(node)
        if len(names) == 1 and 1 < period <= _MOST and one.relation in ("==", "!="):
            growths = (_growth(one.expression, {names[0]: n}, period) for n in range(period))
            if all(growth[1:] == [0] for growth in growths):
                rests.setdefault(names[0], {})[one] = period
    joined: dict[Guard, Guard] = {}
    for name, several in rests.items():
        period = math.lcm(*several.values())
        if len(several) > 1 and period <= _MOST:
            kept = {n for n in range(period) if all(one.holds({name: n}) for one in several)}
            alone = [
                one for one in several if kept == {n for n in range(period) if one.holds({name: n})}
            ]
            first = [n for n in kept if (n - 1) % period not in kept]
            if alone or len(first) == 1:
                whole = alone[0] if alone else _rest_from(name, period, first[0], len(kept))
                joined |= dict.fromkeys(several, whole)
    return [*dict.fromkeys(joined.get(one, one) for one in guards)]


def _rest_from(name: str, period: int, first: int, count: int) -> Guard:
    """Returns the condition that the rest of a size is one of a few in turn, from the first on."""
    if count == 1:
        return Guard(f"mod({name}, {period})", "==", first)
    moved = name if not first else f"{name} + {period - first}"
    return Guard(f"mod({moved}, {period})", "<=", count - 1)


class _Allowed:
    """The sizes that conditions on single ones allow.

    Attributes:
        begin: Sizes -> the least.
        period: After how many sizes the conditions on rests are the same.
    """

    def __init__(self, names: Sequence[str], plain: Sequence[Guard]) -> None:
        self._known: dict[str, list[Guard]] = {name: [] for name in names}
        self.begin = dict.fromkeys(names, 0)
        self.period = 1
        for one in plain:
            found = _PLAIN.fullmatch(one.expression)
            name = found and (found[1] or found[2])
            if found is None or name not in self._known:
                continue
            self._known[name].append(one)
            if found[3]:
                self.period = math.lcm(self.period, int(found[3]))
            elif one.relation == ">=":
                self.begin[name] = max(self.begin[name], one.value)

    def has(self, name: str, size: int) -> bool:
        """Returns whether all conditions allow a size."""
        return all(one.holds({name: size}) for one in self._known[name])

    def has_rest(self, name: str, size: int) -> bool:
        """Returns whether those on rests do."""
        rests = [one for one in self._known[name] if one.expression != name]
        return all(one.holds({name: size}) for one in rests)


def _first(guard: Guard, allowed: _Allowed, name: str, period: int) -> int | None:
    """Returns the size from which on a condition holds, where it holds for none below."""
    at = allowed.begin[name] + period
    while not _holds_from(guard, allowed, {name: at}, period):
        at += period
        if at > allowed.begin[name] + min(_MOST, 1000 * period):
            return None
    tried = [n for n in range(allowed.begin[name], at + period) if allowed.has(name, n)]
    right = [n for n in tried if guard.holds({name: n})]
    wrong = [n for n in tried if not guard.holds({name: n})]
    return right[0] if right and (not wrong or right[0] > wrong[-1]) else None


def _holds_from(guard: Guard, allowed: _Allowed, begin: Mapping[str, int], period: int) -> bool:
    """Returns whether a condition holds for all allowed sizes from some on."""
    ranges = [
        [n for n in range(first, first + period) if allowed.has_rest(name, n)]
        for name, first in begin.items()
    ]
    for sizes in itertools.product(*ranges):
        value, *growth = _growth(guard.expression, dict(zip(begin, sizes, strict=True)), period)
        if value is None or not RELATIONS[guard.relation](value, guard.value):
            return False
        away = 1 if guard.relation == ">=" or value > guard.value else -1
        moves = [one for one in growth if one]
        if (guard.relation == "==" and moves) or any(away * one < 0 for one in moves):
            return False  # it comes to its bound later
    return True


def _growth(expression: str, sizes: Mapping[str, int], period: int) -> list[Any]:
    """Returns a value, and what it grows by in a period of each size, and beyond that in all.

    The value is None where it cannot be evaluated.
    """
    names = [*sizes]
    found = []
    for some in itertools.product((0, 1), repeat=len(names)):
        more = {name: sizes[name] + period * one for name, one in zip(names, some, strict=True)}
        value = size_of(expression, more)
        if value is None:
            return [None]
        found.append(value)
    for at in range(len(names)):  # differences along each size
        step = 1 << at
        found = [one - found[i - step] if i & step else one for i, one in enumerate(found)]
    return found


def _period(node: ast.expr) -> int:
    """Returns after how many sizes an expression has grown by the same; 0 if it does not."""
    match node:
        case ast.Name() | ast.Constant(int()):
            return 1
        case ast.UnaryOp(ast.USub(), inner):
            return _period(inner)
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return math.lcm(_period(left), _period(right))
        case ast.BinOp(left, ast.Mult(), right) if not _names(left) & _names(right):
            return math.lcm(_period(left), _period(right))
        case ast.BinOp(inner, ast.FloorDiv() | ast.Mod(), ast.Constant(int(divisor))):
            return _period(inner) * max(divisor, 0) if _is_sum(inner) else 0
    return 0


def _is_sum(node: ast.expr) -> bool:
    """Returns whether sizes are multiplied by numbers alone."""
    products = [
        one for one in ast.walk(node) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult)
    ]
    return not any(_names(one.left) and _names(one.right) for one in products)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


class _Simplify(ast.NodeTransformer):
    """Takes `max(1, n)` for `n`, and `(3*n + 6) // (n + 2)` for 3, where conditions say that."""

    def __init__(self, plain: Sequence[Guard]) -> None:
        self._plain = plain

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if text(node.func) == "max" and len(node.args) == 2:
            for one, other in (node.args, node.args[::-1]):
                least = one.value if isinstance(one, ast.Constant) else None
                if isinstance(least, int) and self._holds(other, ">=", least):
                    return other
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.FloorDiv | ast.Mod) and _names(node.right):
            ones = dict.fromkeys(_names(node), 1)
            values = [size_of(text(one), ones) for one in (node.left, node.right)]
            if None not in values and values[1]:
                factor = values[0] // values[1]
                rest = ast.BinOp(node.left, ast.Sub(), _times(factor, node.right))
                if self._holds(rest, "==", 0) and self._holds(node.right, ">=", 1):
                    return ast.Constant(factor if isinstance(node.op, ast.FloorDiv) else 0)
        return node

    def _holds(self, node: ast.expr, relation: str, value: int) -> bool:
        return not _solve(Guard(text(node), relation, value), self._plain)


def _times(factor: int, node: ast.expr) -> ast.expr:
    return ast.BinOp(ast.Constant(factor), ast.Mult(), node)
