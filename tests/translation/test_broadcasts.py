"""Arrays are not repeated for operations that repeat them themselves."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fmapper.translation.source import translate_proved  # noqa: E402

pytestmark = pytest.mark.nightly


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 8, 6))
        self.score = nn.Linear(6, 1)
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        slots = self.slots.expand(x.shape[0], -1, -1)
        pairs = self.score(x).expand(-1, -1, x.shape[1]) + self.score(x).mT.expand(
            -1, x.shape[1], -1
        )
        attention = F.normalize(x, dim=-1) @ (slots * x).mT + pairs
        return attention @ (x + self.shift.expand(x.shape[0], 8, 6))


class Repeated(nn.Module):
    """What it expands has users that need the copies: a sum, a result, a smaller array."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 8, 6))

    def forward(self, x: Any) -> Any:
        slots = self.slots.expand(x.shape[0], -1, -1)
        rows = self.slots.expand(x.shape[0], -1, -1) + self.slots
        return x.sum() + slots.sum((0, 1)), slots * x, rows


@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
@pytest.mark.parametrize("to", ["flax", "equinox", "jax"])
def test_what_is_expanded_for_operations_on_elements_is_not(to):
    torch.manual_seed(0)
    _source, proof, _ = translate_proved(Normalized(), to, (torch.randn(3, 8, 6),))
    assert proof


@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
def test_what_others_read_stays_expanded():
    torch.manual_seed(0)
    _source, proof, _ = translate_proved(Repeated(), "flax", (torch.randn(3, 8, 6),))
    assert proof
