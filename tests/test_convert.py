"""Converted models: what they compute, what they are, and what they refuse."""

import importlib.util
from pathlib import Path

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

spec = importlib.util.spec_from_file_location("converting", Path(__file__).parent / "converting.py")
converting = importlib.util.module_from_spec(spec)
spec.loader.exec_module(converting)
check = converting.check
nn = torch.nn


def test_a_multilayer_perceptron():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    converted = check(model, torch.randn(5, 4))
    assert sorted(converted.params) == sorted(dict(model.named_parameters()))


def test_a_convolutional_network():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, dilation=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    check(model, torch.randn(2, 3, 32, 32))
