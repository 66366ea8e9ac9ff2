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
from fmapper.translation.guards.periods import solve

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


@pytest.mark.sampled(8)
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


def linear(draw: random.Random, names: str, depth: int) -> str:
    """Returns a random sum of sizes, with floor divisions and rests."""
    if depth == 0:
        return draw.choice([*names, str(draw.randint(0, 9))])
    left = linear(draw, names, depth - 1)
    kind = draw.choice(["+", "-", "*", "//", "mod", "max", "steps"])
    if kind in ("mod", "max"):
        return f"{kind}({left}, {draw.randint(1, 5)})"
    if kind == "steps":
        return f"(({left})*{draw.randint(1, 3)} + {draw.randint(0, 4)}) // ({left} + 1)"
    if kind in "*//":
        return (
            f"({draw.randint(1, 3)}*{left})" if kind == "*" else f"({left} // {draw.choice('234')})"
        )
    return f"({left} {kind} {linear(draw, names, depth - 1)})"


@pytest.mark.sampled(31)
@pytest.mark.nightly_cases(
    "0",
    "5",
    "11",
    "13",
    "15",
    "21",
    "22",
    "26",
    "30",
    "36",
    "39",
    "40",
    "48",
    "50",
    "53",
    "65",
    "68",
    "70",
    "78",
    "82",
    "86",
    "89",
    "90",
    "93",
    "98",
    "101",
    "103",
    "114",
    "132",
    "140",
    "145",
    "146",
    "150",
    "153",
    "158",
    "164",
    "169",
    "171",
    "178",
    "180",
    "181",
    "184",
    "185",
    "189",
    "192",
    "193",
    "199",
    "206",
    "207",
    "208",
    "210",
    "217",
    "218",
    "227",
    "229",
    "242",
    "259",
    "261",
    "267",
    "268",
    "271",
    "276",
)
@pytest.mark.parametrize("seed", range(300))
def test_what_single_sizes_imply_is_left_out_for_all_sizes(seed: int) -> None:
    draw = random.Random(seed)
    names = draw.choice(["a", "ab"])
    plain = [Guard(name, ">=", draw.randint(0, 20)) for name in names if draw.random() < 0.7]
    for name in names if draw.random() < 0.5 else "":
        plain.append(Guard(f"mod({name}, 4)", draw.choice(["==", "!="]), draw.randint(0, 3)))
    relation = draw.choice(["==", "!=", "!=", ">=", "<="])
    asked = linear(draw, names, 3)
    if draw.random() < 0.4:
        asked = f"({linear(draw, 'a', 2)})*({linear(draw, 'b', 2)}) + {asked}"
        names = "ab"
    guards = [*plain, Guard(asked, relation, draw.randint(-5, 90))]
    found = solve(guards)
    most = 400 if names == "a" else 70
    for values in itertools.product(range(most), repeat=len(names)):
        sizes = dict(zip(names, values, strict=True))
        holds = all(one.holds(sizes) for one in guards)
        assert holds == all(one.holds(sizes) for one in found), (guards, found, sizes)


@pytest.mark.parametrize(
    "guards",
    [
        [Guard("a", ">=", 16), Guard("b", ">=", 16), Guard("a + b", "!=", 40)],
        [Guard("a", ">=", 16), Guard("b", ">=", 16), Guard("a + b", ">=", 40)],
        [Guard("mod(a, 32) + mod(b, 32)", "<=", 61)],
        [Guard("a//16//16//16", "!=", 5)],
        [Guard("a*a - b", "!=", 143)],
    ],
)
def test_conditions_that_few_sizes_break_stay(guards: list[Guard]) -> None:
    assert solve(guards) == guards


def test_conditions_that_follow_from_single_sizes_go() -> None:
    least = [Guard("a", ">=", 16), Guard("b", ">=", 16)]
    for expression, relation, value in (
        ("a + b", ">=", 32), ("3 - a//2 - b", "<=", -20), ("a + 2*b", "!=", 47),
        ("a - 4*(a//4)", "<=", 3), ("mod(a, 4) + mod(b, 4)", "!=", 7), ("3*a*(b//2)", ">=", 384),
        ("a - max(1, a - 7)", "==", 7), ("(3*a + 6*b) // (a + 2*b)", "==", 3),
    ):  # fmt: skip
        assert solve([*least, Guard(expression, relation, value)]) == least


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


@pytest.mark.nightly
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
