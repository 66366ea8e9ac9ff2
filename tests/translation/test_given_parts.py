"""Parts that constructors are given, sums in loops, and sizes that parts read themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fmapper.translation.source import translate_proved


class PreNorm(nn.Module):
    def __init__(self, width: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(width), fn

    def forward(self, x: Any, **options: Any) -> Any:
        return self.fn(self.norm(x), **options)


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Any) -> Any:
        x, gate = self.linear(x).chunk(2, -1)
        return x * torch.sigmoid(gate)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.gate, self.mlp = PreNorm(8, Gate(8)), PreNorm(8, mlp)

    def forward(self, x: Any) -> Any:
        x = self.gate(x) + x
        return self.mlp(x) + x


@pytest.mark.nightly
def test_a_part_that_is_another_class_each_time_is_an_argument() -> None:
    for target in ("flax", "equinox"):
        _source, proof, _ = translate_proved(Net().eval(), target, (torch.randn(2, 5, 8),))
        assert proof


class Residual(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x) + x


class Macaron(nn.Module):
    """Wraps small parts in each of several blocks: the file has the code for one of those."""

    def __init__(self) -> None:
        super().__init__()
        parts = [Gate(8), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), Gate(8)]
        self.layers = nn.Sequential(*map(Residual, parts), nn.LayerNorm(8))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


@pytest.mark.nightly
def test_parts_that_items_of_lists_are_given_are_counted_once() -> None:
    net = nn.Sequential(*(Macaron() for _ in range(4)))
    _source, proof, _ = translate_proved(net, "flax", (torch.randn(2, 5, 8),))
    assert proof


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Split() for _ in range(4)])

    def forward(self, x: Any) -> Any:
        total = 0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return total


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.skip = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.linear(x))
        return x, self.skip(x)


@pytest.mark.nightly
def test_a_sum_over_parts_is_one_loop() -> None:
    source, proof, _ = translate_proved(Skips().eval(), "flax", (torch.randn(2, 8),))
    assert proof
    source.code.partition("class Skips")[2]


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Conv2d(8, 8, 1, bias=False))
                for size in (1, 2, 3)
            ]
        )

    def forward(self, x: Any) -> Any:
        height, width = x.shape[2:]
        found = [x]
        for stage in self.stages:
            y = stage(x)
            found.append(nn.functional.interpolate(y, (height, width), mode="bilinear"))
        return torch.cat(found, 1)


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 3, 2, 1), Pool()

    def forward(self, x: Any) -> Any:
        return self.pool(self.stem(x))


@pytest.mark.nightly
def test_parts_whose_functions_differ_in_numbers_are_a_comprehension() -> None:
    _source, proof, _ = translate_proved(Pyramid().eval(), "flax", (torch.randn(2, 3, 12, 12),))
    assert proof


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, size))
                for name, size in (("depth", 1), ("normal", 3), ("edge", 2))
            }
        )

    def forward(self, input: Any) -> Any:
        given = torch.relu(input)
        return {name: head(given) + input.mean() for name, head in self.heads.items()}


@pytest.mark.nightly
def test_parts_by_name_are_a_dictionary() -> None:
    _source, proof, _ = translate_proved(Heads().eval(), "flax", (torch.randn(2, 8),))
    assert proof


class Bottleneck(nn.Module):
    def __init__(self, width: int, stride: int, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(width, width, (depth, 1, 1), padding=(depth // 2, 0, 0))
        self.conv2 = nn.Conv3d(width, 8, (1, 3, 3), (1, stride, stride), (0, 1, 1))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        x = self.relu(self.conv1(x))
        x = self.conv2(x)
        x = self.relu(x)
        return x


@pytest.mark.nightly
def test_blocks_with_strides_along_some_dimensions_are_one_class() -> None:
    net = nn.Sequential(Bottleneck(4, 1, 3), Bottleneck(8, 2, 1))
    _source, proof, _ = translate_proved(net.eval(), "flax", (torch.randn(2, 4, 4, 8, 8),))
    assert proof


class Dilated(nn.Module):
    """Two stacks of dilated convolutions, so that paddings are arguments of their class."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(8, 8, size, padding=(size * d - d) // 2, dilation=d, bias=False)
            for d in (1, 3, 5)
        )

    def forward(self, x: Any) -> Any:
        for conv in self.convs:
            x = x + conv(torch.relu(x))
        return x


@pytest.mark.nightly
def test_parts_with_a_default_and_with_arguments_are_a_comprehension() -> None:
    net = nn.Sequential(Dilated(3), Dilated(5))
    for target in ("flax", "equinox"):
        _source, proof, _ = translate_proved(net, target, (torch.randn(2, 8, 16),))
        assert proof


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.full((4, 1), 1e-6))

    def forward(self, x: Any) -> Any:
        modes = torch.fft.rfft(x)[..., :3]
        return self.scale * torch.einsum("bim,iom->bom", modes, self.weight).abs()


@pytest.mark.nightly
def test_constants_and_complex_products_are_short() -> None:
    _source, proof, _ = translate_proved(Spectral().eval(), "flax", (torch.randn(2, 4, 8),))
    assert proof


class ConvNorm(nn.Sequential):
    def __init__(
        self, given: int, width: int, kernel: int = 3, stride: int = 1, act: Any = nn.ReLU
    ) -> None:
        conv = nn.Conv2d(given, width, kernel, stride, kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(width), *([act()] if act else []))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 8, 3, 2)
        self.body = nn.Sequential(ConvNorm(8, 16, act=nn.Hardswish), ConvNorm(16, 16, 1))
        self.tail = nn.Sequential(ConvNorm(16, 8, 5, 2, None), ConvNorm(8, 8, 1, 1, None))

    def forward(self, x: Any) -> Any:
        return self.tail(self.body(self.stem(x)))


@pytest.mark.nightly
def test_sequences_that_are_classes_of_the_source_are_classes_of_the_file() -> None:
    source, proof, _ = translate_proved(Tower(), "flax", (torch.randn(2, 3, 16, 16),))
    assert proof
    assert source.modes == ("eval", "train")


class Activated(nn.Module):
    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(width, 8), nn.Linear(8, 8), act

    def forward(self, x: Any) -> Any:
        y = self.act(self.first(x))
        return self.act(y + self.second(y))


class Activations(nn.Module):
    def __init__(self, *kinds: nn.Module) -> None:
        super().__init__()
        self.stem = Activated(4, nn.GELU())
        self.blocks = nn.ModuleList([Activated(8, kind) for kind in kinds])

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.nightly
def test_an_activation_that_is_another_one_each_time_is_an_argument() -> None:
    kinds = (nn.SiLU(), nn.LeakyReLU(0.1), nn.Identity(), nn.ReLU())
    for target in ("flax", "equinox"):
        model = Activations(*kinds)
        _source, proof, reason = translate_proved(model, target, (torch.randn(3, 4),))
        assert proof
        assert not reason


class Method(nn.Module):
    def __init__(self, *, is_cumulative: bool) -> None:
        super().__init__()
        self.linear, self.is_cumulative = nn.Linear(8, 8), is_cumulative

    def forward(self, x: Any, other: Any) -> Any:
        x = self.linear(x) + other
        return x.cumsum(1) if self.is_cumulative else x.cumprod(1)


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Method(is_cumulative=True), Method(is_cumulative=False)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x, x), x)


@pytest.mark.nightly
def test_methods_of_variables_are_not_arguments() -> None:
    _source, proof, _ = translate_proved(Methods(), "flax", (torch.randn(3, 8),))
    assert proof


class Doubled(nn.Module):
    """Has two sequences, which end with an activation or with nothing."""

    def __init__(self, inputs, outputs, *, relu=True):
        super().__init__()
        end = [nn.ReLU(inplace=True) if relu else nn.Sequential() for _ in range(2)]
        self.first = nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), end[0])
        self.second = nn.Sequential(nn.Linear(outputs, outputs), nn.BatchNorm1d(outputs), end[1])

    def forward(self, x):
        x1 = self.first(x)
        x2 = self.second(x1)
        return torch.cat([x1, x2], 1)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Doubled(3, 4), Doubled(8, 6, relu=False), Doubled(12, 4)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


@pytest.mark.nightly
def test_sequences_that_end_with_an_activation_or_nothing_are_of_one_class():
    torch.manual_seed(0)
    _source, proof, _ = translate_proved(Several(), "flax", (torch.randn(5, 3),))
    assert proof


@pytest.mark.nightly
def test_slices_of_everything_that_are_changed_in_place_are_what_they_are_slices_of():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)[:, :4, :]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                y = block(x)[:, :, :]
                y += x
                x = y
            return x

    torch.manual_seed(0)
    _source, proof, _ = translate_proved(Net(), "flax", (torch.randn(2, 3, 4),))
    assert proof
