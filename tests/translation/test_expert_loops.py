"""Models that pick rows by their values, as experts do, in files that are compiled."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.up = nn.Parameter(torch.randn(3, 4, 5))
        self.down = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        with torch.no_grad():
            mask = nn.functional.one_hot(chosen, num_classes=3).permute(2, 1, 0)
            hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        out = torch.zeros_like(x)
        for row in hit:
            expert = row[0]
            place, token = torch.where(mask[expert])
            rows = nn.functional.silu(x[token] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, token, rows * weights[token, place, None])
        return out


class Picked(nn.Module):
    def forward(self, x):
        return torch.nonzero(x[:, 0] > 0) * 2


def test_rows_of_experts_take_the_size_of_their_mask():
    torch.manual_seed(0)
    net = Experts()
    found, _, proof = translate(net, "flax", (torch.randn(6, 4),), proved=True)
    assert proof, str(proof)
    assert "places_of(" in found.code
    model = fmapper.convert(net, "flax", (torch.randn(6, 4),), structure=True)
    x = torch.randn(9, 4) if "check_shapes((x, '_ 4'))" in found.code else torch.randn(6, 4)
    gave = np.asarray(nnx.jit(lambda model, x: model(x))(model, x.numpy()))
    np.testing.assert_allclose(gave, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_rows_that_values_count_are_no_result():
    with pytest.raises(fmapper.ConversionError, match="number depends on values") as told:
        fmapper.source(Picked(), "flax", (torch.randn(6, 4),))
    assert "torch.where(mask, a, b)" in str(told.value)
    assert "test_expert_loops.py" in str(told.value)


class Picks(nn.Module):
    def forward(self, x, ids):
        return x[ids == 0]


class Adapted(nn.Module):
    """The layer of a language computes the rows of that language, as in X-MOD."""

    def __init__(self, picks=None):
        super().__init__()
        self.adapter = nn.Linear(3, 3)
        self.picks = picks

    def forward(self, x, ids):
        rows = x[ids == 0] if self.picks is None else self.picks(x, ids)
        new = torch.zeros_like(x)
        new[ids == 0] = self.adapter(rows)
        return new + x


def test_parts_are_given_padded_rows():
    inputs = torch.randn(4, 5, 3), torch.tensor([0, 1, 0, 2])
    source, _, proof = translate(Adapted(), "flax", inputs, None, None, proved=True)
    assert proof
    assert "_nonzero_static(" in source.code


def test_a_part_that_makes_rows_returns_no_padding():
    inputs = torch.randn(4, 5, 3), torch.tensor([0, 1, 0, 2])
    with pytest.warns(fmapper.NotCompiledWarning):
        code = translate(Adapted(Picks()), "flax", inputs, None, None)[0].code
    assert "_nonzero_static(" not in code
