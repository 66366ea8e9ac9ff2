"""Idioms of models in public repositories: named results, members by key, losses of parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation.source import translate_proved  # noqa: E402


class Encoded(NamedTuple):
    hidden: Any
    penalty: Any


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Any) -> Encoded:
        hidden = self.linear(x)
        return Encoded(hidden, hidden.pow(2).mean())


def test_named_tuples_keep_their_name() -> None:
    source, proof, _ = translate_proved(Encoder(), "flax", (torch.randn(2, 4),))
    assert proof
    assert "class Encoded(NamedTuple):" in source.code
    assert "return Encoded(hidden=" in source.code


class ScaleDiscriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.pool = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        hidden = self.conv(x).mean(2)
        return hidden, self.pool(hidden)


class Scales(nn.Module):
    """Has parts by name that are all alike, as discriminators of several scales."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({f"disc_{i}": ScaleDiscriminator() for i in range(4)})

    def forward(self, x: Any) -> Any:
        results = []
        for part in self.model.values():
            results.append(part(x))
            x = nn.functional.avg_pool1d(x, 2)
        return results


def test_parts_by_name_that_are_alike_are_a_comprehension() -> None:
    source, proof, _ = translate_proved(Scales(), "flax", (torch.randn(2, 1, 40),))
    assert proof
    assert "{name: ScaleDiscriminator(rngs=rngs) for name in (" in source.code


def normed(*args: Any, **kwargs: Any) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Conv1d(*args, **kwargs))


class Dilated(nn.Module):
    def __init__(self, dim: int, dilation: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.ReflectionPad1d(dilation), normed(dim, dim, 3, dilation=dilation)
        )
        self.outer = normed(dim, dim, kernel_size=1)

    def forward(self, x: Any) -> Any:
        return x + self.outer(self.inner(x).tanh())


def test_names_are_read_through_functions_that_pass_everything_on() -> None:
    layers = nn.Sequential(Dilated(4, 1), nn.Conv1d(4, 6, 1), Dilated(6, 3))
    source, proof, _ = translate_proved(layers, "flax", (torch.randn(2, 4, 20),))
    assert proof
    assert "def __init__(self, dim, dilation, *, rngs: nnx.Rngs):" in source.code
