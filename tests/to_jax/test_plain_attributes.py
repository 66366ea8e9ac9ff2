"""A conversion leaves the numbers and flags of a module as they were."""

import numpy as np
import pytest
import torch
from torch import nn

import fmapper


class Rescaled(nn.Module):
    """Scales its weights for evaluation at the first call, as RWKV does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.is_scaled = False
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.is_scaled == self.training:
            with torch.no_grad():
                self.linear.weight.mul_(2.0 if self.training else 0.5)
            self.is_scaled = not self.training
        return self.linear(x)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_flag_about_weights_stays_with_them():
    torch.manual_seed(0)
    net, x = Rescaled().eval(), torch.randn(2, 4)
    wanted, calls = net(x).detach(), net.calls
    weight = net.linear.weight.detach().clone()
    for target in ("jax", "flax"):
        fmapper.convert(net, target, (x,), train=True)
        assert (net.is_scaled, net.calls, net.training) == (True, calls, False)
        assert torch.equal(net.linear.weight, weight)
        model = fmapper.convert(net, target, (x,))
        assert (net.is_scaled, net.calls) == (True, calls)
        np.testing.assert_allclose(model(x.numpy()), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(net(x), wanted)


def test_a_lazy_module_keeps_the_sizes_that_it_got():
    net = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    fmapper.convert(net, "jax", (torch.randn(2, 5),))
    assert net[0].in_features == 5


@pytest.mark.nightly
def test_lazy_convolutions_and_statistics_are_converted_before_their_first_call():
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(3, 2, 5, 5)
    for target in ("jax", "flax"):
        made = fmapper.convert(net, target, (x,), train=True)
        assert net.training
        assert not net[1].running_mean.any()
        assert made is not None
    model = fmapper.convert(net.eval(), "jax", (x,))
    np.testing.assert_allclose(model(x.numpy()), net(x).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(fmapper.ConversionError, match="cannot be called with the examples"):
        fmapper.convert(nn.Sequential(nn.LazyConv2d(4, 3)), "jax", (torch.randn(3),))


class Number(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(3)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.counts = {"all": 0}

    def forward(self, x):
        self.seen.append(x.mean())
        self.counts["all"] += 1
        return x * len(self.seen)


class Tally:
    def __init__(self):
        self.count = 1


class Holding(nn.Module):
    """Counts in an object that is no module."""

    def __init__(self):
        super().__init__()
        self.tally = Tally()

    def forward(self, x):
        self.tally.count += 1
        return x * self.tally.count


class Idle(nn.Module):
    """Assigns what is there already."""

    def __init__(self):
        super().__init__()
        self.sizes, self.scale = [2, 3], 2.0

    def forward(self, x):
        self.sizes, self.scale = [2, 3], 2.0
        return x * self.scale


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Number, "0.calls"),
        (Average, "0.mean"),
        (Growing, "0.seen, 0.counts"),
        (Holding, "0.tally.count"),
    ],
)
def test_attributes_that_a_call_changes_are_named_and_as_they_were(kind, names):
    inner = kind()
    net, x = nn.Sequential(inner), torch.arange(6.0).reshape(2, 3)
    before = {name: value for name, value in vars(inner).items() if not name.startswith("_")}
    with pytest.warns(fmapper.ConversionWarning, match=f"Sequential: a call changes {names}, "):
        model = fmapper.convert(net, "jax", (x,))
    assert all(vars(inner)[name] is value for name, value in before.items())
    assert (inner.tally.count if kind is Holding else 1) == 1
    assert getattr(inner, "seen", []) == []
    assert getattr(inner, "counts", {"all": 0}) == {"all": 0}
    assert not torch.as_tensor(getattr(inner, "mean", 0)).any()
    np.testing.assert_allclose(model(x.numpy()), net(x), rtol=1e-6)


def test_attributes_are_named_without_a_comparison():
    with pytest.warns(fmapper.ConversionWarning, match="changes calls, "):
        fmapper.convert(Number(), "jax", (torch.ones(2),), check=False)


def test_equal_values_are_not_a_change():
    fmapper.convert(Idle(), "jax", (torch.ones(2),))  # warnings are errors here


def test_verify_leaves_the_attributes_of_both_models_as_they_were():
    net = Growing()
    fmapper.verify(net, net, torch.ones(2, 3))
    assert (net.seen, net.counts) == ([], {"all": 0})
