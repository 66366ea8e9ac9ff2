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
