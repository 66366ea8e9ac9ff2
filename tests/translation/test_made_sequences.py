"""Sequences that a function of the model makes are a class of the file, with its arguments."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402


def make_conv_norm(inp, oup, stride):
    return nn.Sequential(
        nn.Conv2d(inp, oup, 3, stride, 1, bias=False),
        nn.GroupNorm(2, oup),
        nn.ReLU(inplace=True),
    )


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = make_conv_norm(3, 8, 2)
        self.rest = nn.Sequential(
            make_conv_norm(8, 8, 1), make_conv_norm(8, 16, 2), make_conv_norm(16, 16, 1)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.rest(self.first(x)).mean((2, 3)))


class OfMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self._block(3, 4)
        self.second = self._block(4, 6)
        self.third = self._block(6, 8)

    def _block(self, inp, oup):
        return nn.Sequential(nn.Linear(inp, oup), nn.Tanh(), nn.Linear(oup, oup))

    def forward(self, x):
        return self.third(self.second(self.first(x)))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = make_conv_norm(3, 8, 1), make_conv_norm(8, 4, 1)

    def forward(self, x):
        return self.other(self.one(x))


def test_sequences_that_a_function_makes_are_one_class_with_its_arguments():
    code = fmapper.source(Deep().eval(), "flax", (torch.randn(2, 3, 8, 8),))
    assert "class ConvNorm(Sequential)" in code
    assert "def __init__(self, inp, oup, stride" in code
    assert code.count("GroupNorm(oup, 2") == 1


def test_sequences_that_a_method_makes_are_one_class():
    code = fmapper.source(OfMethods().eval(), "flax", (torch.randn(2, 3),))
    assert "class Block(Sequential)" in code
    assert "self.second = Block(4, 6, rngs=rngs)" in code


def test_a_few_sequences_stay_what_they_are():
    code = fmapper.source(Twice().eval(), "flax", (torch.randn(2, 3, 8, 8),))
    assert code.count("(Sequential)") == 0
