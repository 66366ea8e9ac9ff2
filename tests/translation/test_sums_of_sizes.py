"""Conditions on products of sizes, as those of views, are few, and allow the same sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.programs.program import Guard  # noqa: E402
from fmapper.translation.guards.conditions import strictest  # noqa: E402
from fmapper.translation.source import translate_proved  # noqa: E402

# `x.view(-1, 2 * 6 * 7)` of a batch of planes, and what is then done with rows for each of them.
FLAT = [
    "mod(2*b*h*w, 84) == 0",
    "-84*floordiv(b*h*w, 42) + 2*b*h*w == 0",
    "b - floordiv(b*h*w, 42) == 0",
    "mod(2*h*w, 84) == 0",
    "2*h*w == 84",
    "mod(b*h*w, 42) == 0",
]
# The same of a plane after a convolution with a stride.
STRIDED = [
    "mod(8*b*floordiv(h - 3, 2)*floordiv(w - 3, 2) + 8*b*floordiv(h - 3, 2)"
    " + 8*b*floordiv(w - 3, 2) + 8*b, 32) == 0",
    "8*floordiv(h - 3, 2)*floordiv(w - 3, 2) + 8*floordiv(h - 3, 2) + 8*floordiv(w - 3, 2) == 24",
]
# Space to depth, where sizes are read from views.
SQUEEZED = [
    "b*h*w - 4*b*floordiv(h, 2)*floordiv(w, 2) == 0",
    "mod(h, floordiv(h, 2)) == 0",
    "floordiv(h, floordiv(h, 2)) == 2",
    "w - floordiv(w, 2)*floordiv(w, floordiv(w, 2)) == 0",
    "mod(w, floordiv(w, 2)) == 0",
    "floordiv(w, floordiv(w, 2)) == 2",
    "mod(c*floordiv(h, floordiv(h, 2))*floordiv(w, floordiv(w, 2)), 4*c) == 0",
    "c*floordiv(h, floordiv(h, 2))*floordiv(w, floordiv(w, 2)) == 12",
    "floordiv(h, 2)*floordiv(w, 2) - max(1, floordiv(h, 2))*max(1, floordiv(w, 2)) == 0",
    "mod(floordiv(h, 2), floordiv(h, 4)) == 0",
    "floordiv(h, 2*floordiv(h, 4)) == 2",
    "floordiv(h, 4) >= 1",
    "floordiv(w, 2) >= 1",
]
# What a stride of two before each of several others leaves.
HALVED = ["mod(h//2, 2) == 0", "mod(h//4, 2) == 0", "floordiv(w, 8) - 2*floordiv(w, 16) == 0"]
# The view of scores that shifts relative positions: its sizes are quotients of a square.
_ROWS = "floordiv(floordiv(h, 2)**2, floordiv(h, 2))"
_SHIFTS = f"2*{_ROWS}*floordiv(h, 2) - {_ROWS}"
SHIFTED = [
    f"floordiv(h, 2) - {_ROWS} == 0",
    f"{_ROWS}*floordiv(h, 2) - floordiv(h, 2)**2 == 0",
    f"mod({_SHIFTS}, floordiv(h, 2)) == 0",
    f"2*floordiv(h, 2) - floordiv({_SHIFTS}, floordiv(h, 2)) == 1",
    f"floordiv(h, 2) - floordiv({_SHIFTS}, floordiv(h, 2)) <= 0",
]
EXPECTED = {
    "shifted": (SHIFTED, []),
    "flat": (FLAT, ["h * w == 42"]),
    "strided": (STRIDED, ["(h - 1) // 2 * ((w - 1) // 2) == 4"]),
    "squeezed": (SQUEEZED, ["mod(h, 4) == 0", "mod(w, 2) == 0", "c == 3"]),
    "halved": (HALVED, ["mod(h // 2, 4) == 0", "mod(w // 8, 2) == 0"]),
}


def guard(text: str) -> Guard:
    expression, relation, value = text.rsplit(" ", 2)
    return Guard(expression, relation, int(value))


@pytest.mark.daily_cases("flat", "squeezed")
@pytest.mark.parametrize("name", EXPECTED)
def test_products_of_sizes_are_said_once(name: str) -> None:
    texts, expected = EXPECTED[name]
    guards = [guard(one) for one in texts]
    found = strictest(guards, {"b", "c", "h", "w"})
    texts = [f"{one.expression} {one.relation} {one.value}" for one in found]
    assert [one for one in texts if ">=" not in one] == expected
    ranges = range(1, 3), range(2, 5), range(2, 45), range(2, 45)
    for sizes in itertools.product(*ranges):
        known = dict(zip("bchw", sizes, strict=True))
        allowed = all(one.holds(known) for one in found)
        assert allowed == all(one.holds(known) for one in guards), known


class Flat(nn.Module):
    """Has rows of a view that hold for its sizes alone, though the view is of others, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.linear = nn.Linear(2 * 4 * 5, 3)

    def forward(self, x: Any) -> Any:
        rows = self.conv(x).view(-1, 2 * 4 * 5)
        return self.linear(rows).sum(0) / rows.size(0)


@pytest.mark.nightly
def test_a_view_with_a_number_does_not_take_other_sizes() -> None:
    torch.manual_seed(0)
    source, proof, _ = translate_proved(Flat(), "flax", (torch.randn(3, 1, 6, 7),))
    assert proof
    assert "check((x.shape[3] - 2) * (x.shape[2] - 2) == 20, " in source.code
