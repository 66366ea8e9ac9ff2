"""Sizes that vary, among the arguments and results of the parts of a model."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate, translate_proved  # noqa: E402


class Attention(nn.Module):
    """Attends to fewer places, as that of PVT."""

    def __init__(self, width, ratio):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.reduce = nn.Conv2d(width, width, ratio, ratio)

    def forward(self, hidden_states, height, width):
        batch, length, channels = hidden_states.shape
        x = hidden_states.permute(0, 2, 1).reshape(batch, channels, height, width)
        x = self.reduce(x).reshape(batch, channels, -1).permute(0, 2, 1)
        query = (
            self.query(hidden_states)
            .reshape(batch, length, 2, -1)
            .sum(2)
            .reshape(batch, length, -1)
        )
        x = x[..., : x.shape[-1] // 2]
        return (torch.softmax(query @ x.transpose(1, 2), -1) @ x).repeat(1, 1, 2)


class Layer(nn.Module):
    """Takes the sizes of a picture as numbers."""

    def __init__(self, width, ratio):
        super().__init__()
        self.attention = Attention(width, ratio)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden_states, height, width):
        return hidden_states + self.attention(self.norm(hidden_states), height, width)


class Embed(nn.Module):
    """Gives the sizes of a picture as numbers."""

    def __init__(self, width, out, stride):
        super().__init__()
        self.project = nn.Conv2d(width, out, 2 * stride - 1, stride, padding=stride - 1)

    def forward(self, x):
        x = self.project(x)
        _, _, height, width = x.shape
        return x.flatten(2).transpose(1, 2), height, width


class Stages(nn.Module):
    """Halves a picture from stage to stage."""

    def __init__(self):
        super().__init__()
        self.embed = nn.ModuleList([Embed(3, 8, 4), Embed(8, 12, 2), Embed(12, 16, 2)])
        self.layers = nn.ModuleList(
            [nn.ModuleList([Layer(w, r) for _ in range(2)]) for w, r in [(8, 4), (12, 2), (16, 1)]]
        )

    def forward(self, x):
        batch = x.shape[0]
        for embed, layers in zip(self.embed, self.layers, strict=True):
            x, height, width = embed(x)
            for layer in layers:
                x = layer(x, height, width)
            x = x.reshape(batch, height, width, -1).permute(0, 3, 1, 2).contiguous()
        return x


@pytest.mark.nightly
def test_sizes_that_parts_pass_on_have_their_names():
    net, x = Stages(), torch.randn(2, 3, 64, 96)
    code = fmapper.source(net, "flax", (x,))
    space = {"__name__": "translated"}
    exec(compile(code, "translated.py", "exec"), space)
    model = space["Stages"](rngs=nnx.Rngs(0))
    space["load_weights"](model, {key: one.numpy() for key, one in net.state_dict().items()})
    for given in (x, torch.randn(1, 3, 128, 80)):
        np.testing.assert_allclose(model(given.numpy()), net(given).detach(), atol=2e-5)


class Fixed(nn.Module):
    def forward(self, x):
        return x * 2 if len(x) % 7 == 4 else x


def test_sizes_that_the_code_fixes_are_told():
    source = translate(Fixed(), "flax", (torch.ones(4, 3),))[0]
    (sentence,) = source.fixed
    assert sentence.startswith("x.shape[0] is 4: the code fixes it at ")
    assert "check_shapes((x, '4 " in source.code


class Pooled(nn.Module):
    """Flattens what is left of an image, as ResNets for small images do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2, 1)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        x = nn.functional.avg_pool2d(torch.relu(self.conv(x)), 4)
        return self.linear(x.view(x.size(0), -1))


@pytest.mark.nightly
def test_conditions_that_torch_cannot_solve_fix_all_but_the_first_size():
    net, x = Pooled(), torch.randn(2, 3, 8, 8)
    with pytest.warns(fmapper.FixedSizeWarning, match="cannot solve the conditions on its sizes"):
        model = fmapper.convert(net, "flax", (x,), dynamic_shapes="auto")
    y = torch.randn(5, 3, 8, 8)
    np.testing.assert_allclose(model(y.numpy()), net(y).detach(), rtol=1e-5, atol=1e-6)


class WholePools(nn.Module):
    """Pools with windows as large as what it pools."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)

    def forward(self, x):
        x = self.conv(x)
        mean = nn.functional.avg_pool2d(x, x.size()[2:])
        rows = x.flatten(2)
        return (
            mean.flatten(1),
            nn.functional.max_pool1d(rows, rows.size(2)).squeeze(2),
            (nn.functional.max_pool2d(x, kernel_size=x.size()[2:])),
        )


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
def test_pools_of_all_there_is_fix_no_size():
    net = WholePools()
    given = torch.randn(2, 3, 8, 10), torch.randn(3, 3, 7, 5)
    model = fmapper.convert(net, "flax", (given[0],), structure=True, dynamic_shapes="auto")
    for x in given:
        for found, wanted in zip(model(x.numpy()), net(x), strict=True):
            np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    _source, proof, _ = translate_proved(net, "flax", (given[0],))
    assert proof, proof


class Scan(nn.Module):
    """Multiplies three arrays in one sum, as selective state spaces do."""

    def __init__(self):
        super().__init__()
        self.delta, self.matrix = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return torch.einsum("bld,bln,bld->bldn", self.delta(x), self.matrix(x), x).sum(-1)


@pytest.mark.nightly
def test_sums_of_products_of_three_arrays_leave_sizes_free():
    _source, proof, _ = translate_proved(Scan(), "flax", (torch.randn(2, 5, 4),))
    assert proof


class Folded(nn.Module):
    """Folds a signal by its period, as the discriminators of HiFi-GAN do."""

    def __init__(self, period):
        super().__init__()
        self.period = period
        self.conv = nn.Conv2d(1, 4, (3, 1), padding=(1, 0))

    def forward(self, x):
        rest = x.shape[-1] % self.period
        if rest:
            x = nn.functional.pad(x, (0, self.period - rest), "reflect")
        return self.conv(x.view(x.shape[0], 1, -1, self.period)).flatten(1)


class Periods(nn.Module):
    def __init__(self):
        super().__init__()
        self.folds = nn.ModuleList([Folded(period) for period in (2, 3, 5)])

    def forward(self, x):
        return [fold(x) for fold in self.folds]


@pytest.mark.nightly
def test_paddings_to_two_are_those_to_any_number():
    module, x = Periods(), torch.randn(2, 1, 31)
    source, proof, _ = translate_proved(module, "flax", (x,))
    assert proof, proof
    re.findall(r"check\((.*?), ", source.code.split("def check_inputs")[1])
    space = {"__name__": "translated"}
    exec(compile(source.code, "translated.py", "exec"), space)
    model = space["load_weights"](space["Periods"](rngs=nnx.Rngs(0)), {
        key: value.numpy() for key, value in module.state_dict().items()
    })  # fmt: skip
    longer = torch.randn(3, 1, 47)
    for found, wanted in zip(model(longer.numpy()), module(longer), strict=True):
        np.testing.assert_allclose(found, wanted.detach(), rtol=1e-5, atol=1e-5)
