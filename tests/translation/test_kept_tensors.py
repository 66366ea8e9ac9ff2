"""Tensors that a model of torch keeps in attributes, and sets anew as it runs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from fmapper.translation.source import translate_proved  # noqa: E402


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.proj(x)


class Moved(torch.nn.Module):
    """Brings a table to the device of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.register_buffer("table", torch.randn(9, 4), persistent=False)

    def forward(self, x: Any) -> Any:
        self.table = self.table.to(x.device)
        return self.attention(x + self.table[: x.shape[1]])


def test_a_table_that_is_moved_to_its_own_device_is_no_change() -> None:
    source, proof, reason = translate_proved(Moved(), "flax", (torch.randn(2, 5, 4),))
    assert proof
    assert not reason
    assert "[...] = " not in source.code
