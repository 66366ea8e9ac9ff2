"""Places in sorted numbers are a line of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation import run_file  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402

pytestmark = pytest.mark.nightly


class Binned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.tensor([-1.0, 0.0, 0.0, 2.0]))

    def forward(self, x: Any) -> Any:
        return (
            torch.bucketize(x, self.edges),
            torch.bucketize(x, self.edges, right=True),
            torch.searchsorted(self.edges, x, side="right"),
        )


def test_bins_of_numbers_are_searched_by_jax() -> None:
    model = Binned()
    source, _, _ = translate(model, "flax", (torch.randn(2, 3),))
    assert source.code.count("jnp.searchsorted(self.edges[...], x") == 3
    file = run_file(source)
    built = file[source.name](rngs=nnx.Rngs(0))
    file["load_weights"](built, {key: value.numpy() for key, value in model.state_dict().items()})
    x = torch.tensor([[-2.0, -1.0, -0.5, 0.0], [1.0, 2.0, torch.inf, torch.nan]])
    for found, wanted in zip(built(x.numpy()), model(x), strict=True):
        np.testing.assert_array_equal(found, wanted)
