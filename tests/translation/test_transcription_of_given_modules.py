"""Modules that constructors are given, and what modules are given on, in files for Flax NNX."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("flax")

import torch.nn.functional as F  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402

from fmapper.translation.source import note_arguments  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402


def run(made, model, *inputs):
    """Returns a model of the file with the arrays of the source, and what it gives."""
    space: dict = {}
    exec(made.whole, space)
    net = space["make_model"](rngs=nnx.Rngs(0))
    space["load_weights"](net, {name: x.numpy() for name, x in model.state_dict().items()})
    net.eval()
    return net, net(*(jnp.asarray(x.numpy()) for x in inputs))


class Feed(nn.Module):
    def __init__(self, width, act):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.act = act
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Encoder(nn.Module):
    def __init__(self, layer, depth):
        super().__init__()
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Tagger(nn.Module):
    def __init__(self, embed, encoder, heads, config):
        super().__init__()
        self.embed = embed
        self.encoder = encoder
        self.heads = nn.ModuleList(heads)
        self.drop = nn.Dropout(config.rate)

    def forward(self, x):
        x = self.drop(self.encoder(self.embed(x)))
        return [head(x) for head in self.heads]


def tagger():
    torch.manual_seed(0)
    with note_arguments():
        embed = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8))
        heads = [nn.Linear(8, 3), nn.Linear(8, 2, bias=False)]
        encoder = Encoder(nn.Sequential(Feed(8, nn.GELU()), nn.Dropout(0.5)), 2)
        return Tagger(embed, encoder, heads, SimpleNamespace(rate=0.1)).eval()


@pytest.fixture(scope="module")
def tagged():
    model, x = tagger(), torch.randint(0, 10, (3, 5))
    return model, x, transcribe(model, (x,))


@pytest.mark.nightly
def test_modules_that_are_given_are_made_where_they_are_given(tagged):
    model, x, made = tagged
    assert made.example == (
        "Tagger(embed=Sequential(Embedding(num_embeddings=10, embedding_dim=8, rngs=rngs), "
        "LayerNorm(normalized_shape=8, rngs=rngs)), encoder=Encoder(layer=Sequential(Feed(width=8, "
        "act=partial(nnx.gelu, approximate=False), rngs=rngs), nnx.Dropout(rate=0.5, rngs=rngs)), "
        "depth=2, rngs=rngs), heads=[Linear(in_features=8, out_features=3, rngs=rngs), "
        "Linear(in_features=8, out_features=2, bias=False, rngs=rngs)], "
        "config=SimpleNamespace(rate=0.1), rngs=rngs)"
    )
    for ours, theirs in zip(run(made, model, x)[1], model(x), strict=True):
        assert jnp.allclose(ours, theirs.detach().numpy(), atol=1e-5)


@pytest.mark.nightly
def test_copies_of_a_module_draw_other_numbers(tagged):
    model, x, made = tagged
    net, _ = run(made, model, x)
    net.train()
    first, second = ([*layer][1](jnp.ones((64, 8))) for layer in net.encoder.layers)
    assert not jnp.array_equal(first, second)


class Twice(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


def test_a_module_that_is_given_twice_is_refused():
    with note_arguments():
        part = nn.Linear(2, 2)
        model = Twice(part, part)
    with pytest.raises(NotTranscribed, match="Linear is given twice"):
        transcribe(model, (torch.ones(1, 2),))


class Attention(nn.Module):
    def __init__(self, heads, rate):
        super().__init__()
        self.heads, self.rate = heads, rate

    def forward(self, x, mask=None):
        q = k = v = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        rate = self.rate if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal=mask is None)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.nightly
def test_dropout_of_attention_stays_in_training():
    model, x = Attention(2, 0.5).eval(), torch.randn(2, 6, 8)
    made = transcribe(model, (x,))
    assert "is_causal=mask is None" in made.whole
    net, result = run(made, model, x)
    assert jnp.allclose(result, model(x).numpy(), atol=1e-5)
    net.train()
    first, second = (net(jnp.asarray(x.numpy())) for _ in range(2))
    assert not jnp.allclose(first, second)
    assert bool(made.prove(model, (x,)))


class Transition(nn.Sequential):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.conv = nn.Conv1d(width, width, 3, padding=1, padding_mode="circular")


class Dense(nn.Module):
    def __init__(self, width, growth, use_bias):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(width + i * growth, growth, 1) for i in range(3)])
        self.last = Transition(width + 3 * growth)
        self.weight = nn.Parameter(torch.empty(2, width + 3 * growth, 1))
        self.bias = nn.Parameter(torch.zeros(2)) if use_bias else None
        self.apply(self.start)
        nn.init.normal_(self.weight)

    @staticmethod
    def start(module):
        if isinstance(module, nn.Conv1d):
            nn.init.normal_(module.weight, std=0.1)

    def joined(self, arrays):
        return torch.cat(arrays, 1)

    def length(self, x, dim):
        return (x**2).sum(dim=dim, keepdim=True).sqrt()

    def forward(self, x):
        arrays = [x]
        for layer in self.layers:
            arrays.append(layer(self.joined(arrays)))
        x = self.last(torch.cat(arrays, 1))
        x = x / self.length(x, 1) + x / self.length(x, -1)
        return F.conv1d(x, self.weight, self.bias)


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.parts = nn.ModuleList([Dense(width, 2, use_bias) for use_bias in (True, False)])

    def forward(self, x):
        return sum(part(x) for part in self.parts)


@pytest.mark.nightly
def test_lists_that_grow_dimensions_that_are_given_and_arrays_that_are_absent():
    torch.manual_seed(0)
    model, x = Pair(3).eval(), torch.randn(2, 3, 6)
    made = transcribe(model, (x,), ((3,), {}))
    assert not made.fallen
    assert "return jnp.concatenate(arrays, axis=1)" in made.whole
    assert "(x**2).sum(axis=dim, keepdims=True)" in made.whole
    assert "self.start(module, rngs=rngs)" in made.whole
    assert jnp.allclose(run(made, model, x)[1], model(x).detach().numpy(), atol=1e-5)
