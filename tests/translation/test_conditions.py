"""Conditions on sizes, made simpler: they hold for the same sizes, and say the same of code."""

from __future__ import annotations

import itertools
import random

import pytest

from fmapper.programs.program import Guard
from fmapper.programs.sizes import size_of
from fmapper.translation.code import text
from fmapper.translation.guards.conditions import strictest
from fmapper.translation.guards.expressions import parse
from fmapper.translation.guards.facts import Facts

SIZES = [dict(zip("ab", values, strict=True)) for values in itertools.product(range(14), repeat=2)]


def expression(draw: random.Random, depth: int) -> str:
    """Returns a random expression of `a` and `b`."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(["a", "b", "a", "b", str(draw.randint(0, 5))])
    kind = draw.choice(["+", "-", "*", "*", "//", "mod", "max", "min"])
    left = expression(draw, depth - 1)
    if kind == "//":
        return f"({left} // {draw.randint(1, 6)})"
    if kind == "mod":
        return f"mod({left}, {draw.randint(1, 6)})"
    right = expression(draw, depth - 1)
    if kind in ("max", "min"):
        return f"{kind}({left}, {right})"
    return f"({left} {kind} {right})"


def condition(draw: random.Random, example: dict[str, int]) -> Guard | None:
    """Returns a random condition that holds for an example."""
    one = expression(draw, draw.randint(1, 4))
    value = size_of(one, example)
    if value is None:
        return None
    relation = draw.choice(["==", "!=", "!=", ">=", "<=", ">="])
    other = draw.choice([value + 1, 0 if value else 1, 1 if value != 1 else 2, -1])
    told = {"==": value, "!=": other if other != value else value + 1,
            ">=": value - draw.randint(0, 2), "<=": value + draw.randint(0, 2)}  # fmt: skip
    return Guard(one, relation, told[relation], "")


@pytest.mark.parametrize("seed", range(200))
def test_fewer_conditions_hold_for_the_same_sizes(seed: int) -> None:
    draw = random.Random(seed)
    example = {"a": draw.randint(1, 12), "b": draw.randint(1, 12)}
    guards = [g for _ in range(draw.randint(1, 6)) if (g := condition(draw, example)) is not None]
    found = strictest(guards, "ab")
    asked = parse(expression(draw, 4))
    simpler = Facts("ab", found).simplify(asked)
    for sizes in SIZES:
        holds = all(one.holds(sizes) for one in guards)
        assert holds == all(one.holds(sizes) for one in found), (guards, found, sizes)
        if holds:
            assert size_of(text(asked), sizes) == size_of(text(simpler), sizes), (guards, sizes)


def test_products_of_sizes_say_what_their_factors_are() -> None:
    """Torch asks whether a convolution's result is contiguous: of rows that are at least two."""
    area, rows = "(a // 4) * (b // 4)", "(a // 4)"
    guards = [
        Guard(area, ">=", 2),
        Guard(f"{area} - 4*max(1, {area})**2", "<=", -1),
        Guard(f"{area} - {rows}", ">=", 1),
        Guard(f"64*n*{area} - {rows}", ">=", 1),
    ]
    found = strictest(guards, "abn")
    assert [(one.expression, one.value) for one in found] == [("a", 4), ("b", 8), ("n", 1)]


def test_rests_of_halvings_are_one_condition() -> None:
    half, quarter, eighth = (f"(-1 + a)//{n}" for n in (2, 4, 8))
    guards = [
        Guard(f"{half} - 2*({quarter})", "==", 1),
        Guard(f"{half} - 4*({eighth})", "==", 3),
        Guard(f"{quarter} - 2*({eighth})", "==", 1),
    ]
    found = strictest(guards, "a")
    assert [(one.expression, one.value) for one in found] == [("mod((-1 + a) // 2, 4)", 3)]
    for a in range(200):
        assert all(one.holds({"a": a}) for one in guards) == found[0].holds({"a": a})


def test_a_flattened_image_of_several_places_is_one_condition() -> None:
    """Torch asks whether the places of an image are one, and multiplies everything out."""
    rows, columns = "((-1 + a)//16)", "((-1 + b)//16)"
    guards = [
        Guard(f"{rows}*{columns} + {rows} + {columns}", ">=", 1),
        Guard(
            f"{rows}**2 + {columns}**2 + {rows}**2*{columns}**2 + 2*{rows}**2*{columns}"
            f" + 2*{columns}**2*{rows} + 3*{rows}*{columns} + {rows} + {columns}",
            ">=",
            1,
        ),
    ]
    for told in (guards, guards[:1], guards[1:]):
        found = strictest(told, "ab")
        product = "((-1 + a) // 16 + 1) * ((-1 + b) // 16 + 1)"
        assert [(one.expression, one.value) for one in found] == [(product, 2)]
        for sizes in ({"a": a, "b": b} for a in range(40) for b in range(40)):
            assert all(one.holds(sizes) for one in told) == found[0].holds(sizes)
