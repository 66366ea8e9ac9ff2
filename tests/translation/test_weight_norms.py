"""Layers under `weight_norm` and `spectral_norm` are layers of the target that normalise."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fmapper
from fmapper.translation.source import translate_proved

OLD = pytest.mark.filterwarnings("ignore::FutureWarning")


class ByLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = parametrizations.weight_norm(nn.Conv1d(3, 8, 3, padding=1))
        self.along = parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1, groups=2), dim=2)
        self.up = parametrizations.weight_norm(nn.ConvTranspose1d(8, 4, 4, 2, 1))
        self.old = nn.utils.weight_norm(nn.Linear(4, 2))

    def forward(self, x):
        x = torch.tanh(self.along(torch.tanh(self.enter(x))))
        return self.old(torch.tanh(self.up(x)).mean(-1))


@pytest.mark.nightly
@OLD
@pytest.mark.parametrize(
    ("target", "wrapper"), [("flax", "WeightNorm("), ("equinox", "eqx.nn.WeightNorm(")]
)
def test_weight_norm_is_a_layer_in_one_that_normalises(target, wrapper):
    pytest.importorskip(target)
    torch.manual_seed(0)
    source, proof, reason = translate_proved(ByLength(), target, (torch.randn(2, 3, 6),))
    assert proof, reason
    assert source.modes == ("eval", "train")


@pytest.mark.nightly
@OLD
def test_a_structured_model_has_the_layers_and_their_arrays():
    torch.manual_seed(0)
    net, x = ByLength(), torch.randn(2, 3, 6)
    model = fmapper.convert(net, "flax", (x,), structure=True)
    kernel = net.enter.parametrizations.weight.original1.detach().numpy()
    np.testing.assert_array_equal(model.enter.layer.kernel[...], kernel.transpose(2, 1, 0))
    lengths = net.along.parametrizations.weight.original0.detach().numpy()
    np.testing.assert_array_equal(model.along.scale[...], lengths.transpose(2, 1, 0))
    y = torch.randn(2, 3, 6)
    for part in (model.enter, model):
        theirs = (net.enter if part is model.enter else net)(y).detach()
        np.testing.assert_allclose(part(y.numpy()), theirs, rtol=1e-5, atol=1e-6)


class Projection(nn.Module):
    """The head of a projection discriminator, whose table is normalised, too."""

    def __init__(self):
        super().__init__()
        self.table = parametrizations.spectral_norm(nn.Embedding(5, 4))
        self.other = parametrizations.weight_norm(nn.Embedding(5, 4))
        self.old = nn.utils.spectral_norm(nn.Embedding(5, 4))

    def forward(self, x, y):
        return (x * (self.table(y) + self.other(y) * self.old(y))).sum(1)


@pytest.mark.nightly
@OLD
@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_embeddings_are_layers_in_ones_that_normalise(target):
    pytest.importorskip(target)
    torch.manual_seed(0)
    inputs = torch.randn(3, 4), torch.tensor([0, 3, 4])
    source, proof, reason = translate_proved(Projection(), target, inputs)
    assert proof, reason
    if target == "flax":
        assert source.modes == ("eval", "train")


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = parametrizations.spectral_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.up = parametrizations.spectral_norm(nn.ConvTranspose2d(8, 4, 2, 2))
        self.old = nn.utils.spectral_norm(nn.Conv2d(4, 8, 3, 2, 1), n_power_iterations=2)
        self.leave = parametrizations.spectral_norm(nn.Linear(8, 1), n_power_iterations=3)

    def forward(self, x):
        x = torch.relu(self.up(torch.relu(self.enter(x))))
        return self.leave(torch.relu(self.old(x)).mean((2, 3)))


@pytest.mark.nightly
def test_spectral_norm_iterates_in_training():
    torch.manual_seed(0)
    source, proof, reason = translate_proved(Critic(), "flax", (torch.randn(2, 3, 8, 8),))
    assert proof, reason
    assert source.modes == ("eval", "train")
    source.code.replace('"', "'")


@pytest.mark.nightly
def test_vectors_of_spectral_norm_are_those_of_torch_after_each_call():
    torch.manual_seed(0)
    net, x = Critic(), torch.randn(2, 3, 8, 8)
    model = fmapper.convert(net, "flax", (x,), structure=True, train=True)
    for mode in ("train", "train", "eval"):
        getattr(net, mode)(), getattr(model, mode)()
        np.testing.assert_allclose(model(x.numpy()), net(x).detach(), rtol=1e-5, atol=1e-6)
        found = net.up.parametrizations.weight[0]._u
        np.testing.assert_allclose(model.up.u[...], found, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(model.old.v[...], net.old.weight_v, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("dim", [0, 1])
def test_either_dimension_of_a_matrix_may_be_its_rows(dim):
    torch.manual_seed(0)
    layer = parametrizations.spectral_norm(nn.Linear(5, 3), dim=dim)
    net, x = nn.Sequential(layer, nn.Tanh()), torch.randn(2, 5)
    model = fmapper.convert(net, "flax", (x,), structure=True, train=True)
    assert len(model[0].u[...]) == (3, 5)[dim]
    for _ in range(2):
        np.testing.assert_allclose(model(x.numpy()), net(x).detach(), rtol=1e-5, atol=1e-6)


class Other(nn.Module):
    """Normalises by something else than the length."""

    def __init__(self, more):
        super().__init__()
        self.v = nn.Parameter(torch.randn(4, 3))
        self.g = nn.Parameter(torch.randn(4, 1))
        self.more = more

    def forward(self, x):
        length = torch.linalg.vector_norm(self.v, **self.more)
        return nn.functional.linear(x, self.v * (self.g / length))


@pytest.mark.daily_cases("more3-False")
@pytest.mark.parametrize(
    ("more", "is_norm"),
    [
        ({"dim": (1,), "keepdim": True}, True),
        ({"dim": (1,), "keepdim": True, "ord": 1}, False),
        ({"dim": (0, 1), "keepdim": True}, False),
        ({"dim": (0,), "keepdim": True}, False),
    ],
)
def test_only_lengths_along_one_dimension_are_weight_norm(more, is_norm):
    net = nn.Sequential(Other(more), nn.Tanh())
    x = torch.randn(2, 3)
    assert ("WeightNorm" in fmapper.source(net, "flax", (x,))) == is_norm
    model = fmapper.convert(net, "flax", (x,), structure=True)
    np.testing.assert_allclose(model(x.numpy()), net(x).detach(), rtol=1e-5, atol=1e-6)


class Both(nn.Module):
    """Has a layer whose vectors change in training, and code that differs by mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())

    def forward(self, x):
        x = self.body(x)
        return x * 2 if self.training else x


@pytest.mark.nightly
def test_a_class_for_both_modes_may_have_such_layers():
    torch.manual_seed(0)
    source, proof, reason = translate_proved(Both(), "flax", (torch.randn(3, 4),))
    assert proof, reason
    assert source.modes == ("eval", "train")
