"""Norms, spreads and absolute values have the slopes of torch where all elements are zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fmapper.translation import run_file  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


CASES = {
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norm": lambda x: x.norm(dim=-1),
    "norm_of_all": lambda x: x[:1].norm(),
    "norm_1": lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0)),
    "std": lambda x: x.std(-1, keepdim=True),
    "std_mean": lambda x: sum(torch.std_mean(x * 2, 1, unbiased=False)),
    "abs": torch.abs,
    "l1": lambda x: F.l1_loss(x, x.detach()),
}


@pytest.mark.daily_cases("abs")
@pytest.mark.parametrize("name", CASES)
def test_slopes_at_zero_are_those_of_torch(name: str) -> None:
    model = Applied(CASES[name])
    source, _, _ = translate(model, "flax", (torch.randn(3, 4),))
    built = run_file(source)[source.name](rngs=nnx.Rngs(0))
    x = torch.tensor([[0.0, 0, 0, 0], [1, -1, 0, 2], [0.5, 0.5, -0.5, 0]], requires_grad=True)
    wanted = model(x)
    (slope,) = torch.autograd.grad(wanted.sum(), x)
    found = jax.value_and_grad(lambda x: built(x).sum())(x.detach().numpy())
    np.testing.assert_allclose(found[0], wanted.sum().detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], slope, rtol=1e-5, atol=1e-6)
