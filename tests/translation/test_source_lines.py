"""Comments with the model's own lines, and loops that collect what each part gives."""

import pytest
import torch
from torch import nn

import fmapper
from fmapper.programs.program import Guard
from fmapper.translation.functions.collect import collect
from fmapper.translation.guards.conditions import strictest
from fmapper.translation.source import translate
from fmapper.translation.statements.origins import quote, with_comments


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)

    def forward(self, x, angles):
        x = self.project(x)
        x = x * angles.cos() + self.rotate(x) * angles.sin()
        return x.relu()


@pytest.mark.nightly
def test_what_does_not_read_for_itself_has_its_line():
    code = fmapper.source(Rotated(), "flax", (torch.ones(2, 8), torch.ones(2, 8)))
    assert "# x = x * angles.cos() + self.rotate(x) * angles.sin()" in code
    assert "# x = self.project(x)" not in code
    compile(code, "file", "exec")


class InMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 2)

    def features(self, x):
        spread = torch.exp(x * 0.5)
        centre = self.enter(x)
        return centre / spread + spread

    def scaled(self, x):
        hidden = self.features(x)
        return hidden * hidden.mean(-1, keepdim=True)

    def forward(self, x):
        known = self.scaled(x)
        return self.leave(known) + known.sum(-1, keepdim=True)


def test_values_have_the_names_of_the_methods_that_compute_them():
    code = fmapper.source(InMethods(), "flax", (torch.ones(2, 8),))
    for name in ("spread", "centre", "hidden", "known"):
        assert f"        {name} = " in code, code
    assert "total" not in code


def test_a_comment_stays_in_its_line():
    ends = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\x00"
    line = quote("".join(f"x = f('{end}import os')" for end in ends) * 9)
    assert line.startswith("# ")
    assert len(line.splitlines()) == 1
    assert len(line) < 100
    assert line.isprintable()
    assert with_comments("for x in xs:\n    y = x", {"y = x": line}) == [
        f"for x in xs:\n    {line}\n    y = x"
    ]


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(4, 4)

    def forward(self, x, keys):
        keys.append(self.key(x))
        return x + keys[-1]


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Cached() for _ in range(3))

    def forward(self, x):
        keys = []
        for part in self.parts:
            x = part(x, keys)
        return {"x": x.tanh(), "keys": tuple(keys)}


def test_what_each_part_gives_is_collected_in_the_loop():
    source, _, _ = translate(Caching(), "flax", (torch.ones(2, 4),))
    assert source.code.count("in self.parts:") == 1
    assert source.code.partition("def load_weights")[0].count(".append(") == 1
    module: dict = {}
    exec(source.code, module)


def test_a_result_that_is_used_otherwise_is_not_collected():
    lasts = ("return (k, k_2), k", "return (k, k_2, x)", "return (k_2, k)", "k = 1")
    for last in (*lasts, "return (x, k, k_2)[:, 0]", "return x[k:, k_2:]"):
        lines = ["x, k = self.h[0](x)", "x, k_2 = self.h[1](x)", last]
        assert collect(lines) == lines
    lines = ["x, k = self.h[0](x)", "x, k_2 = self.h[2](x)", "return x, (k, k_2)"]
    assert collect(lines) == lines
    lines = ["x, k = self.h[0](x, k)", "x, k_2 = self.h[1](x, k)", "return x, (k, k_2)"]
    assert collect(lines) == lines


def test_bounds_that_meet_are_one_condition():
    least, most = Guard("s", ">=", 3, "a"), Guard("s", "<=", 3, "b")
    assert [one.relation for one in strictest([least, most])] == ["=="]
    assert strictest([least, Guard("s", "<=", 4)]) == [least, Guard("s", "<=", 4)]
    assert strictest([least]) == [least]
