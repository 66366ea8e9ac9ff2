"""Sequences whose items take and give several arrays are sequences in files, too."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation.source import translate_proved  # noqa: E402

pytestmark = pytest.mark.nightly


class Exchange(nn.Module):
    """Adds to each branch what the others have, as high-resolution networks do."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.near = nn.Linear(4, 4)
        self.far = nn.Linear(6, 4)
        self.back = nn.Linear(4, 6) if outputs == 2 else None

    def forward(self, x: list[Any]) -> list[Any]:
        x[0] = self.near(x[0])
        found = [torch.relu(x[0] + self.far(x[1]))]
        if self.back is not None:
            found.append(torch.relu(x[1] + self.back(x[0])))
        return found


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 6)])
        self.stage = nn.Sequential(Exchange(), Exchange(), Exchange(1))

    def forward(self, x: Any) -> Any:
        return self.stage([one(x) for one in self.begin])[0]


class Split(nn.Module):
    def forward(self, x: Any) -> Any:
        return [x[..., :4], x[..., 4:]]


class Forked(nn.Module):
    """Has a sequence that is given one array and gives two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, 10), Split(), Exchange())

    def forward(self, x: Any) -> Any:
        near, far = self.stem(x)
        return near.sum(-1) + far.mean(-1)


@pytest.mark.parametrize("to", ["flax", "equinox", "jax"])
@pytest.mark.parametrize("cls", [Branches, Forked])
def test_a_sequence_of_tuples_is_a_sequence(cls: type[nn.Module], to: str) -> None:
    torch.manual_seed(0)
    _source, proof, reason = translate_proved(cls(), to, (torch.randn(5, 3),))
    assert proof
    assert not reason
