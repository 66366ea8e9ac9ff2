"""Arguments of parts whose values `torch.export` drops, as those of dropout in evaluation."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation.source import translate  # noqa: E402


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: Any, memory: Any, scale: Any) -> Any:
        return self.key(memory) * scale + self.query(hidden).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.cross = nn.LayerNorm(4), nn.Dropout(0.5), Cross()

    def forward(self, x: Any) -> Any:
        scale = (x * 2).expand(x.shape)
        memory = nn.functional.dropout(x.sin(), 0.1, self.training)
        hidden = self.drop(self.norm(x))
        return self.cross(hidden, memory, scale)


def test_arguments_have_the_names_of_what_they_were_dropped_for() -> None:
    code = translate(Net().eval(), "flax", (torch.randn(3, 4),))[0].code
    body = code.partition("class Cross(")[2].partition("\n\n\n")[0]
    assert "def __call__(self, hidden, memory, scale):" in body
    for used in ("self.key(memory)", "self.query(hidden)", "* scale"):
        assert used in body, body
    assert "self.cross(hidden, memory, scale)" in code
