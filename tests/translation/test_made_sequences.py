"""Sequences that a function of the model makes are a class of the file, with its arguments."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate, translate_proved  # noqa: E402


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


@pytest.mark.nightly
def test_sequences_that_a_function_makes_are_one_class_with_its_arguments():
    code = fmapper.source(Deep().eval(), "flax", (torch.randn(2, 3, 8, 8),))
    assert "class ConvNorm(Sequential)" in code
    assert "def __init__(self, inp, oup, stride" in code
    assert code.count("GroupNorm(oup, 2") == 1


@pytest.mark.nightly
def test_sequences_that_a_method_makes_are_one_class():
    code = fmapper.source(OfMethods().eval(), "flax", (torch.randn(2, 3),))
    assert "class Block(Sequential)" in code
    assert "self.second = Block(4, 6, rngs=rngs)" in code


def conv_norm(inp, out, kernel=3, stride=1):
    return nn.Sequential(
        nn.Conv2d(inp, out, kernel, stride, kernel // 2, bias=False), nn.GroupNorm(2, out)
    )


class Chosen(nn.Module):
    """Has a shortcut that depends on its arguments, as in ResNet."""

    def __init__(self, inp, out, stride=1):
        super().__init__()
        self.body = nn.Sequential(conv_norm(inp, out, 3, stride), nn.ReLU(), conv_norm(out, out))
        self.short = conv_norm(inp, out, 1, stride) if stride != 1 else nn.Identity()

    def forward(self, x):
        return torch.relu(self.body(x) + self.short(x))


class Residual(nn.Module):
    """The same, written as a change of an empty sequence."""

    def __init__(self, planes, out, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(planes, out, 3, stride, 1)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(planes, out, 1, stride), nn.GroupNorm(2, out))

    def forward(self, x):
        return torch.relu(self.conv(x) + self.shortcut(x))


class Stages(nn.Module):
    def __init__(self, block, *widths):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.stages = nn.ModuleList([block(inp, out, 1 if inp == out else 2) for inp, out in pairs])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_functions_and_blocks_around_them_have_the_arguments_and_defaults_of_the_source(target):
    pytest.importorskip(target)
    net = Stages(Chosen, 4, 4, 8, 8, 16).eval()
    code = fmapper.source(net, target, (torch.randn(2, 4, 8, 8),))
    for line in (
        "class ConvNorm(Sequential):",
        "def __init__(self, inp, out, kernel=3, stride=1, *, ",
        "def __init__(self, inp, out, stride=1, has_short=False, *, ",
        "ConvNorm(inp, out, stride=stride, ",
        "self.short = ConvNorm(inp, out, kernel=1, stride=stride, ",
    ):
        assert line in code, line


@pytest.mark.nightly
def test_attributes_that_are_set_anew_are_read_as_what_they_are():
    net = Stages(Residual, 4, 4, 8, 16).eval()
    code = fmapper.source(net, "flax", (torch.randn(2, 4, 8, 8),))
    assert "def __init__(self, planes, out, stride=1, has_shortcut=" in code
    assert "Conv(planes, out, (1, 1), strides=stride, " in code


@pytest.mark.nightly
@pytest.mark.parametrize("block", [Chosen, Residual])
@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_files_with_such_arguments_are_equal(target, block):
    pytest.importorskip(target)
    net = Stages(block, 4, 8, 8, 16)
    _, _, proof = translate(net, target, (torch.randn(2, 4, 8, 8),), proved=True)
    assert proof, proof


@pytest.mark.nightly
def test_a_few_sequences_stay_what_they_are():
    code = fmapper.source(Twice().eval(), "flax", (torch.randn(2, 3, 8, 8),))
    assert code.count("(Sequential)") == 0


def conv_3x3_norm(inp, oup):
    parts = {"conv": nn.Conv2d(inp, oup, 3, padding=1), "norm": nn.GroupNorm(2, oup)}
    return nn.Sequential(OrderedDict(parts))


def conv_1x1_norm(inp, oup):
    return nn.Sequential(
        OrderedDict([("conv", nn.Conv2d(inp, oup, 1)), ("norm", nn.GroupNorm(2, oup))])
    )


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [conv_3x3_norm(3, 8)]
        layers += [nn.Tanh() for _ in range(2)]
        self.features = nn.Sequential(*layers)
        self.last = conv_1x1_norm(8, 4)

    def forward(self, x):
        return self.last(self.features(x))


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_sequences_with_names_are_called_after_what_functions_have_in_common(target):
    torch.manual_seed(0)
    source, proof, _ = translate_proved(Named(), target, (torch.randn(2, 3, 6, 6),))
    assert proof
    assert source.code.count("class ConvNorm(") == 1
    assert "class Last(" not in source.code
    assert "return self.norm(self.conv(x))" in source.code
