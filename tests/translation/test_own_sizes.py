"""Numbers that are computed of sizes are computed where they are read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation import run_file  # noqa: E402
from fmapper.translation.source import translate_proved  # noqa: E402


class Landmarks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        size = math.ceil(x.shape[1] / 4)
        return self.linear(x.reshape(x.shape[0], -1, size, 6).sum(2) / size)


class Landmarked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Landmarks()]) for _ in range(2)])

    def forward(self, x: Any) -> Any:
        for (landmarks,) in self.layers:
            x = x + landmarks(x).mean(1, keepdim=True)
        return x


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
def test_blocks_that_round_a_size_up_are_one_class() -> None:
    torch.manual_seed(0)
    model = Landmarked()
    source, proof, _ = translate_proved(model, "flax", (torch.randn(2, 16, 6),))
    assert proof
    file = run_file(source)
    built = file[source.name](rngs=nnx.Rngs(0))
    file["load_weights"](built, {key: value.numpy() for key, value in model.state_dict().items()})
    x = torch.randn(3, 24, 6)
    np.testing.assert_allclose(built(x.numpy()), model(x).detach(), rtol=1e-4, atol=1e-5)
