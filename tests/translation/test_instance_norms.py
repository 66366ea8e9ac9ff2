"""Instance norms are group norms of single channels: layers, or a function."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402

pytestmark = pytest.mark.nightly


class Normed(nn.Module):
    def __init__(self, norm, dims):
        super().__init__()
        self.norm = norm
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 4, 1)

    def forward(self, x):
        return torch.relu_(self.norm(self.conv(x)))


CASES = [
    (nn.InstanceNorm1d(4, affine=True), 1, "GroupNorm(4, 4"),
    (nn.InstanceNorm2d(4, eps=1e-3), 2, "group_norm("),
    (nn.InstanceNorm3d(4, affine=True), 3, "GroupNorm(4, 4"),
]


@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
@pytest.mark.parametrize(("norm", "dims", "printed"), CASES)
def test_instance_norms_are_group_norms(norm, dims, printed):
    model = Normed(norm, dims)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    x = torch.randn(2, 4, *(3, 5, 6)[:dims])
    fmapper.source(model, "flax", (x,))
    for train in (False, True):
        model.train(train)
        made = fmapper.convert(model, "jax", (x,), dynamic_shapes="auto", train=train)
        for batch in (2, 3):
            x = torch.randn(batch, 4, *(7, 4, 5)[:dims])
            found = made(x.numpy())
            np.testing.assert_allclose(found, model(x).detach(), rtol=1e-4, atol=1e-5)


def test_single_elements_and_averages_are_as_in_torch():
    model = Normed(nn.InstanceNorm2d(4), 2)
    with pytest.raises(fmapper.ConversionError, match="more than 1 spatial element"):
        fmapper.convert(model, "jax", (torch.randn(2, 4, 1, 1),))
    averaged = Normed(nn.InstanceNorm2d(4, track_running_stats=True), 2)
    averaged(torch.randn(5, 4, 3, 3))
    x = torch.randn(2, 4, 3, 3)
    found = fmapper.convert(averaged.eval(), "jax", (x,))(x.numpy())
    np.testing.assert_allclose(found, averaged(x).detach(), rtol=1e-4, atol=1e-5)
