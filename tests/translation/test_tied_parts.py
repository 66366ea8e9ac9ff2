"""Blocks that share layers, or whole parts, are one class; the model ties them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation.source import translate  # noqa: E402

pytestmark = pytest.mark.nightly


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.q(x) * self.k(x)


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = Attention()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.shared(x))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Hybrid() for _ in range(3)])
        self.tie()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class OfLayers(Several):
    def tie(self):
        for layer in self.layers[1:]:
            layer.shared.q, layer.shared.k = self.layers[0].shared.q, self.layers[0].shared.k


class OfParts(Several):
    def tie(self):
        self.layers[2].shared = self.layers[0].shared


class OfSome(Several):
    def tie(self):
        self.layers[2].shared.q = self.layers[1].shared.q
        self.layers[1].linear = self.layers[0].linear


@pytest.mark.parametrize(
    ("cls", "ties"),
    [
        (OfLayers, ["layers[2].shared.k = self.layers[0].shared.k"]),
        (OfParts, ["layers[2].shared = self.layers[0].shared"]),
        (OfSome, ["layers[2].shared.q = self.layers[1].shared.q", "layers[1].linear = "]),
    ],
)
def test_blocks_that_share_layers_or_parts_are_one_class_and_tied(cls, ties):
    model = cls().eval()
    x = torch.randn(3, 8)
    source, _, proof = translate(model, "flax", (x,), proved=True)
    assert proof
    space = {"__name__": "translated"}
    exec(compile(source.code, "translated.py", "exec"), space)
    made = space[source.name](rngs=nnx.Rngs(0))
    state = {name: array.numpy() for name, array in model.state_dict().items()}
    made = space["load_weights"](made, state)
    np.testing.assert_allclose(made(x.numpy()), model(x).detach(), rtol=1e-4, atol=1e-6)
    sizes = [p.size for p in nnx.to_flat_state(nnx.state(made, nnx.Param)).leaves]
    assert sum(sizes) == sum(p.numel() for p in model.parameters())


class Gated(nn.Module):
    def __init__(self, fc=None):
        super().__init__()
        self.fc = fc if fc is not None else nn.Linear(8, 16)

    def forward(self, x):
        x = self.fc(x)
        return x[:, :8] * torch.sigmoid(x[:, 8:])


class Shares(nn.Module):
    """Has blocks whose layers are those of others, as TabNet, and blocks that have their own."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(8, 16)
        self.steps = nn.ModuleList([Gated(shared), Gated(), Gated(shared)])
        self.first = shared

    def forward(self, x):
        for step in self.steps:
            x = x + step(x)
        return x + self.first(x)[:, :8]


def test_layers_that_others_have_and_layers_of_their_own_are_of_one_class():
    _source, _, proof = translate(Shares(), "flax", (torch.randn(3, 8),), proved=True)
    assert proof
