"""Layers, sizes and loops of torch as files for Flax NNX have them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402


def translated(module, *inputs, shapes=None):
    """Returns the source of a module after its file has computed what the module does."""
    module.eval()
    source, program, _ = translate(module, "flax", inputs, dynamic_shapes=shapes)
    space = {"__name__": "translated"}
    exec(compile(source.code, "translated.py", "exec"), space)
    model = space[source.name](rngs=nnx.Rngs(0))
    arrays = {**program.parameters, **program.buffers}
    space["load_weights"](model, {name: x.detach().numpy() for name, x in arrays.items()})
    model.eval()
    found = model(*[x.numpy() for x in inputs])
    np.testing.assert_allclose(np.asarray(found), module(*inputs).detach().numpy(), atol=1e-5)
    return source


class Last(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        y, state = self.layers(x)
        cell = state[1] if isinstance(state, tuple) else state
        return y.sum(1) + cell[-1].mean()


class Spoken(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.rnn = kind(4, 4, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 9)

    def forward(self, tokens):
        out, state = self.rnn(self.embed(tokens))
        return self.head(out), state


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "states"), [(nn.LSTM, "state, state_2"), (nn.GRU, "state")])
def test_recurrent_layers_take_sequences_of_every_length(kind, states):
    module = Spoken(kind).eval()
    source, *_ = translate(module, "flax", (torch.ones(2, 5, dtype=torch.int64),))
    assert not source.fixed
    space = {"__name__": "translated"}
    exec(compile(source.code, "translated.py", "exec"), space)
    model = space["Spoken"](rngs=nnx.Rngs(0))
    space["load_weights"](model, {name: x.numpy() for name, x in module.state_dict().items()})
    for size in ((2, 5), (3, 8), (1, 1)):
        tokens = torch.randint(0, 9, size)
        found = jax.tree.leaves(model(tokens.numpy()))
        out, state = module(tokens)
        for got, wanted in zip(found, [out, *(state if kind is nn.LSTM else [state])], strict=True):
            np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-5)


@pytest.mark.nightly
def test_names_of_weights_come_in_order():
    code = translated(Last(nn.LSTM(3, 4, 2, bidirectional=True)), torch.randn(2, 5, 3)).code
    table = code.partition("RENAMED = {\n")[2].partition("}")[0].splitlines()
    assert len(table) == 16
    assert table == sorted(table)


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, 2)
        self.rows = nn.ModuleList(Row() for _ in range(2))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for row in self.rows:
            x = row(x)
        return x


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        batch, count, _ = x.shape
        y = self.mix(x).reshape(batch, count, 2, 2).transpose(1, 2)
        return x + y.reshape(batch, 2, count, 2).transpose(1, 2).reshape(batch, count, 4)


@pytest.mark.nightly
def test_a_size_that_is_worked_out_is_asked_of_an_array_that_has_it():
    source = translated(Patches(), torch.randn(2, 1, 8, 8), shapes="auto")
    assert source.parameters == ("x",)


class Looks(nn.Module):
    """Looks rows up in a table, of its own or of a part."""

    def __init__(self, *, is_own):
        super().__init__()
        self.table = nn.Embedding(5, 3, padding_idx=2)
        self.is_own = is_own

    def forward(self, ids):
        if self.is_own:
            return self.table(ids)
        rows = nn.functional.embedding(ids, self.table.weight, padding_idx=2)
        return rows @ self.table.weight.T


@pytest.mark.nightly
@pytest.mark.parametrize("is_own", [True, False])
def test_the_row_for_padding_gets_no_gradient(is_own):
    module, ids = Looks(is_own=is_own), torch.tensor([[0, 2, 2, 4]])
    module.table.weight.data[2] = 1.0
    source, *_ = translate(module, "flax", (ids,), dynamic_shapes=None)
    space = {"__name__": "translated"}
    exec(compile(source.code, "translated.py", "exec"), space)
    model = space[source.name](rngs=nnx.Rngs(0))
    space["load_weights"](model, {"table.weight": module.table.weight.detach().numpy()})
    found = nnx.grad(lambda model: (model(ids.numpy()) ** 2).sum())(model)
    (module(ids) ** 2).sum().backward()
    (gradient,) = (np.asarray(leaf) for leaf in jax.tree.leaves(found))
    np.testing.assert_allclose(gradient, module.table.weight.grad, rtol=1e-5, atol=1e-5)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.total = nn.EmbeddingBag(10, 4, mode="sum")
        self.mean = nn.EmbeddingBag(12, 4, padding_idx=0)

    def forward(self, x):
        return self.total(x), self.mean(x)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [[[1, 2, 2, 0], [0, 0, 0, 0], [3, 0, 4, 9]], [[1], [0], [3]]])
def test_bags_of_rows(rows):
    torch.manual_seed(0)
    net = Bags()
    x = torch.tensor(rows)
    model = fmapper.convert(net, "flax", (x,), structure=True)
    fmapper.source(net, "flax", (x,), dynamic_shapes="auto")
    for found, wanted in zip(model(x.numpy()), net(x), strict=True):
        np.testing.assert_allclose(found, wanted.detach(), rtol=1e-5, atol=1e-6)


class CrossNet(nn.Module):
    """The cross network of recommenders, whose matrices are a list."""

    def __init__(self, width=6):
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(width, 1)) for _ in range(3)])
        self.bs = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(3)])

    def forward(self, x0):
        x = x0
        for w, b in zip(self.ws, self.bs, strict=True):
            x = x0 * (x @ w) + b + x
        return x


@pytest.mark.nightly
def test_matrices_of_a_list():
    torch.manual_seed(0)
    net = CrossNet()
    translated(net, torch.randn(3, 6))
    model = fmapper.convert(net, "flax", (torch.randn(3, 6),), structure=True)
    x = torch.randn(3, 6)
    np.testing.assert_allclose(model(x.numpy()), net(x).detach(), rtol=1e-5, atol=1e-5)
    back = fmapper.state(model, source=True)
    assert {name: one.shape for name, one in back.items()} == {
        name: one.shape for name, one in net.state_dict().items()
    }
