"""A layer with a second name, which is called as an item of a sequence, is that item."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation import run_file  # noqa: E402
from fmapper.translation.source import translate_proved  # noqa: E402

pytestmark = pytest.mark.nightly


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.conv1 = nn.Sequential(nn.Conv1d(3, 4, 1), self.bn1, nn.ReLU())
        self.conv2 = nn.Sequential(nn.Conv1d(4, 4, 1), self.bn2, nn.ReLU())

    def forward(self, x: Any) -> Any:
        return self.conv2(self.conv1(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.last = nn.Sequential(nn.Linear(5, 5), self.norm)

    def forward(self, x: Any) -> Any:
        return self.norm(self.last(x))


@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
@pytest.mark.parametrize("to", ["flax", "jax"])
def test_a_second_name_that_nothing_calls_is_none_of_the_file(to: str) -> None:
    torch.manual_seed(0)
    model = Named()
    source, proof, _ = translate_proved(model, to, (torch.randn(2, 3, 5),))
    assert proof
    if to == "jax":
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    file = run_file(source)
    built = file[source.name](rngs=nnx.Rngs(0))
    built.eval()
    file["load_weights"](built, {key: value.numpy() for key, value in model.state_dict().items()})
    x = torch.randn(3, 3, 5)
    np.testing.assert_allclose(built(x.numpy()), model.eval()(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
def test_a_layer_that_the_model_calls_too_is_its_own() -> None:
    torch.manual_seed(0)
    _source, proof, _ = translate_proved(Shared(), "flax", (torch.randn(2, 5),))
    assert proof


class Bias(nn.Module):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Any) -> Any:
        return x * self.weight + torch.tanh(x) * self.slope


class Biased(nn.Module):
    def __init__(self, bias: nn.Module | None) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(5, 5), bias

    def forward(self, x: Any) -> Any:
        x = self.linear(x)
        return x if self.bias is None else self.bias(x)


class Biases(nn.Module):
    """Two parts that the model has, too, one of them in two layers, and a layer without one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Bias(0.5), Bias(0.25)
        self.layers = nn.ModuleList([Biased(self.one), Biased(self.other), Biased(self.one)])
        self.last = Biased(None)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
def test_parts_that_objects_of_a_class_are_given_stay_where_they_are() -> None:
    torch.manual_seed(0)
    _source, proof, _ = translate_proved(Biases(), "flax", (torch.randn(2, 5),))
    assert proof
