"""Idioms of repositories of PyTorch in files for Flax NNX, beside what PyTorch computes."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple

import pytest

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("flax")

import torch.nn.functional as F  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402

from fmapper_translate import transcribe  # noqa: E402

Setting = namedtuple("Setting", ["width", "heads"])
pair = lambda size: size if isinstance(size, tuple) else (size, size)  # noqa: E731


class Settings:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)


def scaled(net, scale):
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.constant_(module.weight, 1.0)
            module.weight.data *= scale


def jittered(x, rate, training):
    """
    Adds noise in training.
    """
    if not training:
        return x
    return x + rate * torch.rand(x.shape[0], 1)


def tower(width, depth):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


class Heads(nn.Module):
    def __init__(self, settings, sizes, setting):
        super().__init__()
        make = functools.partial(tower, depth=settings.depth)
        self.side = pair(sizes)
        self.conv = nn.Conv2d(4 // setting.heads, setting.width, 1)
        scaled(self.conv, 0.5)
        self.shuffle = nn.PixelShuffle(2)
        self.parts = nn.Module()
        self.parts.register_buffer("shift", torch.ones(1))
        self.heads = [make(2) for _ in range(2)]
        for i, head in enumerate(self.heads):
            self.add_module(f"head_{i}", head)
        self.last = nn.Sequential(OrderedDict([("norm", nn.LayerNorm(2)), ("act", nn.PReLU())]))

    def forward(self, x):
        if x.ndim != 4:  # of images alone
            raise ValueError(f"{x.dim()} dimensions")
        x = self.shuffle(self.conv(x))
        x = F.interpolate(x, size=self.side, mode="bilinear", align_corners=True)
        mask = x > 0.5
        x = x + 0
        x[mask] = 2
        count = torch.prod(torch.tensor(x.shape[1:])).item()
        x = x.reshape(-1, count)[:, :2]
        x = sum(head(x) for head in self.heads)
        return jittered(self.last(x), 0.1, self.training) + self.parts.shift


@pytest.fixture(scope="module")
def heads():
    torch.manual_seed(0)
    args = (Settings(depth=2), 3, Setting(width=8, heads=1))
    model, x = Heads(*args).eval(), torch.rand(2, 4, 3, 3)
    return model, x, transcribe(model, (x,), (args, {}))


def run(made, model, *inputs):
    """Returns a model of the file with the arrays of the source, and what it gives."""
    space: dict = {}
    exec(made.code, space)
    net = eval(f"lambda rngs: {made.example}", space)(nnx.Rngs(0))
    space["load_weights"](net, {name: x.numpy() for name, x in model.state_dict().items()})
    net.eval()
    return net, net(*(jnp.asarray(x.numpy()) for x in inputs))


@pytest.mark.nightly
def test_a_model_of_idioms_gives_what_it_gives_in_the_source(heads):
    model, x, made = heads
    assert not made.fallen
    net, result = run(made, model, x)
    assert jnp.allclose(result, model(x).detach().numpy(), atol=1e-5)
    net.train()
    assert not jnp.allclose(net(jnp.asarray(x.numpy())), result)


@pytest.mark.nightly
def test_records_that_a_model_is_given_stay_what_they_are(heads):
    made = heads[2]
    assert made.example == "Heads(Settings(depth=2), 3, Setting(width=8, heads=1), rngs=rngs)"
    assert "Setting = namedtuple('Setting', ['width', 'heads'])" in made.code.replace('"', "'")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "line",
    [
        "def pair(size):",
        "module.kernel[...] *= scale",
        "def jittered(x, rate, training, *, rngs):",
        "self.heads = PlainList([make(2, rngs=rngs) for _ in range(2)])",
        "self.parts.shift = Buffer(jnp.ones((1,)))",
        "if x.ndim != 4:  # of images alone",
        'raise ValueError(f"{x.ndim} dimensions")',
        'x = interpolate(x, size=self.side, mode="bilinear", align_corners=True)',
        "x = jnp.where(mask, 2, x)",
        "class PixelShuffle(nnx.Module):",
    ],
)
def test_a_statement_is_that_of_the_source(heads, line):
    assert line in heads[2].code


class Cell(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.width = width
        self.lstm = nn.LSTMCell(width, width)
        self.gru = nn.GRUCell(width, width, bias=False)
        mask = torch.ones(width) if length else None
        self.register_buffer("mask", mask)
        self.net = nn.Sequential()
        self.net.add_module("last", nn.Linear(width, width))

    def forward(self, x, steps):
        h, c, g = x, x, x
        for step, after in zip(steps[:-1], steps[1:]):  # noqa: B905, RUF007
            h, c = self.lstm(x * (after - step), (h, c))
            g = self.gru(h, g)
        if self.mask is not None:
            g = g * self.mask
        return self.net(g + h)


class Cells(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList([Cell(width, length) for length in (0, 3)])

    def forward(self, x, steps):
        for layer in self.layers:
            x = layer(x, steps)
        return x


@pytest.mark.nightly
def test_cells_and_arrays_that_some_modules_have_are_those_of_the_source():
    torch.manual_seed(0)
    model, x, steps = Cells(3).eval(), torch.randn(2, 3), torch.tensor([0.0, 0.5, 2.0])
    made = transcribe(model, (x, steps))
    assert not made.fallen
    result = run(made, model, x, steps)[1]
    assert jnp.allclose(result, model(x, steps).detach().numpy(), atol=1e-5)


Rearrange = rearrange = None  # of einops, where it is installed


class Patches(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.split = Rearrange("b c (n p) -> b n (p c)", p=2)
        self.conv = nn.utils.weight_norm(nn.Conv1d(3, width, 2))
        self.linear = nn.utils.weight_norm(nn.Linear(4, width), dim=1)

    def forward(self, x):
        y = rearrange(self.split(x), "b n c -> b c n")
        z = rearrange(self.conv(y[:, 1:]), "b c n -> b n c")
        return self.linear(self.split(x)) + z


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_patterns_of_einops_stay_and_lengths_of_weights_are_arrays(monkeypatch):
    einops = pytest.importorskip("einops")
    layers = pytest.importorskip("einops.layers.torch")
    monkeypatch.setitem(globals(), "rearrange", einops.rearrange)
    monkeypatch.setitem(globals(), "Rearrange", layers.Rearrange)
    torch.manual_seed(0)
    model, x = Patches(5).eval(), torch.randn(2, 2, 4)
    made = transcribe(model, (x,), ((5,), {}))
    assert 'rearrange(self.split(x), "b n c -> b c n")' in made.code
    assert "from einops import rearrange" in made.code
    net, result = run(made, model, x)
    assert jnp.allclose(result, model(x).detach().numpy(), atol=1e-5)
    assert net.conv.weight_g.shape == (5, 1, 1)
    assert net.linear.weight_g.shape == (1, 4)
