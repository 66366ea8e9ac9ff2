"""What a caller reads of a part's work in place, it computes itself; the part gives its result."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

from fmapper.translation.source import translate_proved  # noqa: E402

pytestmark = pytest.mark.nightly


class PreActivated(nn.Module):
    """Adds to what its first layer makes of its argument, in place."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(first, nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        return x + self.layers(x)


class Nested(nn.Module):
    """Has an argument that a part of a part changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(PreActivated(nn.LeakyReLU(0.2, True)), nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        return torch.cat([x, y], -1)


class Net(nn.Module):
    def __init__(self, *first: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.Sequential(*map(PreActivated, first))

    def forward(self, x: Any) -> Any:
        return self.blocks(self.embed(x))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.nested = Nested()

    def forward(self, x: Any) -> Any:
        return self.nested(self.embed(x))


@pytest.mark.parametrize("to", ["flax", "equinox", "jax"])
def test_activations_in_place_are_computed_where_they_are_read(to: str) -> None:
    torch.manual_seed(0)
    model = Net(nn.ReLU(inplace=True), nn.ReLU(inplace=True))
    _source, proof, reason = translate_proved(model, to, (torch.randn(5, 3),))
    assert proof
    assert not reason


def test_an_argument_that_a_part_of_a_part_changes_is_computed_by_both_callers() -> None:
    torch.manual_seed(0)
    _source, proof, _ = translate_proved(Deep(), "flax", (torch.randn(5, 3),))
    assert proof


def test_what_is_drawn_is_not_drawn_again() -> None:
    torch.manual_seed(0)
    model = Net(nn.Dropout(0.5, inplace=True))
    _source, proof, _ = translate_proved(model, "flax", (torch.randn(5, 3),))
    assert proof


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, scale_shift: Any = None) -> Any:
        x = self.linear(x)
        if scale_shift is not None:
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return torch.relu(x)


class Conditioned(nn.Module):
    """Gives a part the halves of an array as one tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(3, 8)
        self.block = Modulated()
        self.other = Modulated()

    def forward(self, x: Any, time: Any) -> Any:
        halves = self.mlp(time).chunk(2, dim=-1)
        x = x.unflatten(-1, (2, 2)).flatten(-2)  # which torch decomposes
        return self.other(self.block(x, scale_shift=halves))


def test_halves_of_an_array_are_given_as_one_tuple_after_decompositions_too() -> None:
    torch.manual_seed(0)
    args = torch.randn(2, 5, 4), torch.randn(2, 1, 3)
    _source, proof, _ = translate_proved(Conditioned(), "flax", args)
    assert proof
