"""Tensors that a model of torch keeps in attributes, and sets anew as it runs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

import fmapper  # noqa: E402
from fmapper.translation.source import translate_proved  # noqa: E402

pytestmark = pytest.mark.nightly


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
    _source, proof, reason = translate_proved(Moved(), "flax", (torch.randn(2, 5, 4),))
    assert proof
    assert not reason


class Normalised(torch.nn.Module):
    """Keeps the statistics of its input for what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Any, mode: str) -> Any:
        if mode == "norm":
            self.mean, self.stdev = x.mean(1, keepdim=True), x.std(1, keepdim=True)
            return (x - self.mean) / self.stdev * self.scale
        return x / self.scale * self.stdev + self.mean


class Forecast(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.revin = Normalised()
        self.dense = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.revin(self.dense(self.revin(x, "norm")), "denorm")


def test_what_a_call_keeps_beside_is_as_it_was_before() -> None:
    model, x = Forecast(), torch.randn(2, 5, 4)
    _, proof, reason = translate_proved(model, "flax", (x,))
    assert proof, proof
    assert not reason
    assert not {"mean", "stdev"} & vars(model.revin).keys()
    wanted = model(x)
    kept = model.revin.mean
    fmapper.convert(model, "jax", (x,))
    assert model.revin.mean is kept
    torch.testing.assert_close(model(x), wanted)
