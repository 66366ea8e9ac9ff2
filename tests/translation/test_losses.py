"""Losses and poolings of whole arrays are a line of the file, or a function of a few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fmapper.translation import run_file  # noqa: E402
from fmapper.translation.source import translate, translate_proved  # noqa: E402
from models import extremes  # noqa: E402


class Loss(nn.Module):
    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x: Any, target: Any) -> Any:
        return self.function(x, target, **self.options)


CASES = {
    "mse": (Loss(F.mse_loss), "return jnp.square(x - target).mean()"),
    "mse_sum": (Loss(F.mse_loss, reduction="sum"), "return jnp.square(x - target).sum()"),
    "mse_none": (Loss(F.mse_loss, reduction="none"), "return jnp.square(x - target)\n"),
    "smooth": (Loss(F.smooth_l1_loss), "return huber_loss(x, target).mean()"),
    "smooth_beta": (Loss(F.smooth_l1_loss, beta=0.3), "huber_loss(x, target, delta=0.3).mean() /"),
    "smooth_0": (Loss(F.smooth_l1_loss, beta=0.0), "return absolute(x - target).mean()"),
    "huber": (Loss(F.huber_loss, delta=0.5), "return huber_loss(x, target, delta=0.5).mean()"),
    "bce": (Loss(F.binary_cross_entropy), "return binary_cross_entropy(x, target).mean()"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_a_line(name: str) -> None:
    model, _line = CASES[name]
    x, target = torch.rand(3, 5) * 2, torch.rand(3, 5)
    x = x.clamp(max=1) if name == "bce" else x
    x[0, :2] = target[0, :2] = torch.tensor([0.0, 1.0])  # the ends of what a loss has
    x[1, 0] = 0.0
    source, _, _ = translate(model, "flax", (x, target))
    built = run_file(source)[source.name](rngs=nnx.Rngs(0))
    inputs = [x.requires_grad_(), target.requires_grad_()]
    wanted = model(*inputs)
    given = [one.detach().numpy() for one in inputs]
    np.testing.assert_allclose(built(*given), wanted.detach(), rtol=1e-5, atol=1e-6)
    slopes = jax.grad(lambda *xs: built(*xs).sum(), (0, 1))(*given)
    for mine, theirs in zip(slopes, torch.autograd.grad(wanted.sum(), inputs), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_an_infinite_difference_has_the_slope_of_the_line() -> None:
    model = Loss(F.huber_loss)
    x, target = torch.tensor([[1.0, 2.0]]).repeat(2, 1), torch.zeros(2, 2)
    source, _, _ = translate(model, "flax", (x, target))
    huber_loss = run_file(source)["huber_loss"]
    slope = jax.grad(lambda x: huber_loss(x, 0.0))(np.float32(np.inf))
    assert slope == 1


class Pooled(nn.Module):
    def __init__(self, size: Any) -> None:
        super().__init__()
        self.conv, self.size = nn.Conv2d(3, 4, 3), size

    def forward(self, x: Any) -> Any:
        x = self.conv(x)
        return F.adaptive_max_pool2d(x, self.size), F.adaptive_max_pool1d(x.flatten(2), 1)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
@pytest.mark.parametrize("size", [1, (1, 1)])
def test_the_largest_elements_of_images_are_a_line(size: Any) -> None:
    torch.manual_seed(0)
    _source, proof, _ = translate_proved(Pooled(size), "flax", (torch.randn(2, 3, 9, 8),))
    assert proof


@pytest.mark.nightly
@pytest.mark.parametrize("name", extremes.REDUCTIONS)
def test_extremes_have_gradients_where_xla_computes_twice(name: str) -> None:
    torch.manual_seed(0)
    module = extremes.Extremes(extremes.REDUCTIONS[name])
    _source, proof, reason = translate_proved(module, "flax", (extremes.inputs(),))
    assert proof, reason
    assert not reason


class Reduced(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.parametrize("function", [lambda x: x.amax(1), lambda x: x.max(1)[0]])
def test_elements_that_are_equal_share_the_gradient_as_in_the_source(function: Any) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, float("-inf"), 2.0]], requires_grad=True)
    source, _, _ = translate(Reduced(function), "flax", (x.detach(),))
    model = run_file(source)[source.name](rngs=nnx.Rngs(0))
    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    found = jax.jit(jax.grad(lambda x: model(x).sum()))(x.detach().numpy())
    np.testing.assert_array_equal(found, wanted)
