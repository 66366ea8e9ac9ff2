"""Comments with the model's own lines."""

import torch
from torch import nn

import fmapper
from fmapper.translation.statements.origins import quote, with_comments


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
