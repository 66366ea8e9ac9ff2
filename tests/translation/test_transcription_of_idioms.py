"""Idioms of Python and PyTorch in transcribed models, beside what the models compute."""

from __future__ import annotations

import linecache
import sys
import types
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("flax")

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributions import Normal  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.functions import source_of_class  # noqa: E402


class Sizes(NamedTuple):
    width: int = 8
    depth: int = 2


class Looked:
    """Is called, and is no module."""

    def __init__(self, x):
        self.table = x.cumsum(-1)

    def __call__(self, y):
        return self.table[:, np.newaxis] * y


def project(x, weight, bias=None):
    return F.linear(x, weight, bias)


class Head(nn.Module):
    # Its parameter has the name of a module.
    def __init__(self, width, nn: nn.Module, *, has_bias=True):
        super().__init__()
        self.part = nn
        self.weight = torch.nn.Parameter(torch.randn(width, width))
        self.bias = torch.nn.Parameter(torch.ones(width)) if has_bias else None

    def forward(self, x):
        return project(self.part(x), self.weight, self.bias)


class Idioms(nn.Module):
    def __init__(self, sizes=Sizes(), distribution=Normal, act="gelu"):  # noqa: B008
        super().__init__()
        width = sizes.width
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(width)) for _ in range(2))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.rand(width))})
        self.parts = nn.Sequential(*(nn.Linear(width, width) for _ in range(sizes.depth)))
        first = nn.Linear(width, width)
        self.heads = nn.ModuleList([Head(width, first), Head(width, nn.ReLU(), has_bias=False)])
        self.up = nn.ConvTranspose1d(width, 2 * width, 4, stride=2, padding=1, groups=2)
        self.norm = nn.InstanceNorm1d(2 * width)
        self.act, self.distribution = getattr(F, act), distribution
        self.kind = torch.get_default_dtype()
        self.sums = ["b i, b i -> b i", "b i, b j -> b i"]
        self.register_buffer("rows", torch.eye(2).to_sparse(), persistent=False)
        for part in (self.up, self.norm):
            if part.weight is not None:
                nn.init.normal_(part.weight, std=0.1)

    def __twice(self, x):
        return 2 * x

    def __make(self, x, make=None):
        return x if make is None else make()

    def forward(self, x):
        if x.min() < -9 or x.max() > 9:
            raise ValueError("x is not in [-9, 9]")
        assert torch.isfinite(x).all()
        x = checkpoint_sequential(self.parts, 1, x, use_reentrant=False)
        x = self.__twice(checkpoint(self.heads[0], x, use_reentrant=False)) + self.heads[1](x)
        for scale in self.scales:
            x = x * scale
        x = torch.stack([*self.scales]).sum(0) + x * self.scales[0] + self.named["a"]
        x = nn.LayerNorm(x.shape[1:])(x).to(self.kind)
        x = self.act(x) / np.sqrt(x.shape[-1])
        x = sum(torch.einsum(equation, x, x) for equation in self.sums)
        x = self.__make(x, None if x.ndim == 2 else lambda: torch.ones(2, x.shape[1]).bool())
        x = Looked(x)(x[:, None])[:, 0].to(next(self.parameters()).dtype)
        y = self.norm(self.up(x[..., None])) * self.up.stride[0]
        return self.distribution(x, 1 + x**2).log_prob(y.mean((1, 2))[:, None])


@pytest.fixture(scope="module")
def idioms():
    torch.manual_seed(0)
    model, x = Idioms().eval(), torch.randn(3, 8)
    return model, x, transcribe(model, (x,), ((), {}))


def test_a_model_of_idioms_gives_what_it_gives_in_the_source(idioms):
    model, x, made = idioms
    assert not made.fallen
    space: dict = {}
    exec(made.code, space)
    net = eval(made.example, space | {"rngs": nnx.Rngs(0)})
    space["load_weights"](net, {name: x.numpy() for name, x in model.state_dict().items()})
    net.eval()
    for given in (x, torch.randn(5, 8)):
        ours, theirs = net(jnp.asarray(given.numpy())), model(given).detach().numpy()
        assert jnp.allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="x is not in"):
        net(10 * jnp.ones((3, 8)))


@pytest.mark.nightly
def test_a_model_of_idioms_is_proved(idioms):
    model, x, made = idioms
    assert made.prove(model, (x,))
    assert model.rows.is_sparse


def test_a_file_reads_as_the_idioms_do(idioms):
    code = idioms[2].code
    assert "Sizes = namedtuple('Sizes', ['width', 'depth'], defaults=[8, 2])" in code.replace(
        '"', "'"
    )
    assert "for scale in [array[...] for array in self.scales]:" in code
    assert "jnp.einsum(equation, x, x)" in code


class Called(nn.Module):
    """Has methods that are called in place of `forward`."""

    def __init_subclass__(cls, **kwargs):
        if "__call__" in vars(cls):
            cls.forward = vars(cls)["__call__"]
            del cls.__call__


class Part(Called):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.scale = 1.0
        self.scale = nn.Parameter(torch.rand(torch.Size((width,))))

    def __call__(self, x):
        first, rest = torch.split(x, (self.width, x.shape[1] - self.width), 1)
        return torch.cat([first * self.scale, rest], 1)


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part(2), Part(3)])
        self.mask = self.last = None
        self.register_buffer("count", torch.zeros(6))

    def forward(self, x):
        x += 1
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = torch.tril(torch.ones(len(x), len(x)))
        self.count *= 0.5
        self.count += (x > 0).float().mean(0)
        for part in self.parts:
            x = part(x)
        x, self.last = self.mask @ x, x
        return x


def test_a_model_that_keeps_tables_and_changes_its_input_is_transcribed():
    torch.manual_seed(0)
    model, x = Kept().eval(), torch.randn(4, 6)
    before = x.clone()
    made = transcribe(model, (x,), ((), {}))
    assert not made.fallen
    assert (x == before).all()
    assert "forget(self)" in made.code
    space: dict = {}
    exec(made.code, space)
    net = space["Kept"](rngs=nnx.Rngs(0))
    space["load_weights"](net, {name: x.numpy() for name, x in model.state_dict().items()})
    call = nnx.jit(lambda net, x: net(x))
    for rows in (4, 3, 4):
        x = torch.randn(rows, 6)
        ours, theirs = call(net, jnp.asarray(x.numpy())), model(x.clone()).detach().numpy()
        assert jnp.allclose(ours, theirs, atol=1e-5)
    assert jnp.allclose(net.count[...], model.count.numpy(), atol=1e-6)


@pytest.mark.nightly
def test_a_model_that_changes_its_input_is_proved():
    model, x = Kept().eval(), torch.randn(4, 6)
    made = transcribe(model, (x,), ((), {}))
    assert made.prove(model, (x,))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Linear(6, 5))
        self.second = nn.utils.spectral_norm(nn.ConvTranspose1d(5, 4, 3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))[..., None])


@pytest.mark.nightly
def test_spectral_norms_move_in_training_as_in_torch():
    torch.manual_seed(0)
    model, x = Spectral().eval(), torch.randn(3, 6)
    made = transcribe(model, (x,), ((), {}))
    assert not made.fallen
    space: dict = {}
    exec(made.code, space)
    net = space["Spectral"](rngs=nnx.Rngs(0))
    space["load_weights"](net, {name: x.numpy() for name, x in model.state_dict().items()})
    for mode in ("eval", "train", "train", "eval"):
        getattr(net, mode)(), getattr(model, mode)()
        ours, theirs = net(jnp.asarray(x.numpy())), model(x).detach().numpy()
        assert jnp.allclose(ours, theirs, atol=1e-5)
    state = space["source_state"](net)
    for name, array in model.state_dict().items():
        assert jnp.allclose(state[name], array.numpy(), atol=1e-5), name


NOTEBOOK = """
import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return torch.relu(self.linear(x))
"""


def test_classes_of_a_notebook_are_read_by_the_lines_of_their_methods():
    name = "/no/folder/cell.py"  # which `inspect` finds for methods, not for classes
    linecache.cache[name] = (len(NOTEBOOK), None, NOTEBOOK.splitlines(keepends=True), name)
    module = types.ModuleType("notebook")
    exec(compile(NOTEBOOK, name, "exec"), vars(module))
    sys.modules["notebook"] = module
    try:
        code = transcribe(module.Cell(), (torch.ones(2, 4),)).code
        assert "class Cell(nnx.Module):\n    def __init__(self, size=4" in code
        empty = type("Empty", (), {"__module__": "notebook"})
        with pytest.raises(NotTranscribed, match="text of the class Empty is not known: define it"):
            source_of_class(empty)
    finally:
        del sys.modules["notebook"], linecache.cache[name]
