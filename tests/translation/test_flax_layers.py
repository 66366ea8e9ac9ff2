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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layers", "made"),
    [
        (
            nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
            "Recurrent(LSTMCell, 3, 4, num_layers=2, bidirectional=True, batch_first=True",
        ),
        (nn.GRU(3, 4, batch_first=True), "Recurrent(GRUCell, 3, 4, batch_first=True"),
        (nn.RNN(3, 4, nonlinearity="relu", bias=False), "activation=jax.nn.relu"),
    ],
)
def test_recurrent_layers_are_cells_of_linear_layers(layers, made):
    source = translated(Last(layers), torch.randn(2, 5, 3))
    assert source.layers[0] == source.layers[1]


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "shape", "made"),
    [
        (nn.ConvTranspose1d(2, 4, 3, 2, 1, 1, dilation=2), (2, 2, 5), "ConvTranspose(2, 4, (3,)"),
        (nn.ConvTranspose2d(4, 6, (3, 2), 2, groups=2), (2, 4, 5, 5), "GroupedConvTranspose(4, 6"),
        (nn.Conv2d(2, 4, (3, 2), padding="same", bias=False), (2, 2, 5, 5), "padding='SAME'"),
    ],
)
def test_convolutions_are_layers(module, shape, made):
    source = translated(nn.Sequential(module, nn.Flatten()), torch.randn(*shape))
    assert source.layers[0] == source.layers[1]


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


class Cross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x, memory):
        return self.attention(x, memory, memory, need_weights=False)[0]


class Crosses(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.parts = nn.ModuleList(map(Cross, widths))

    def forward(self, x, memory):
        return sum(
            part(x[..., : part.attention.embed_dim], memory[..., : part.attention.embed_dim]).sum()
            for part in self.parts
        )


@pytest.mark.nightly
@pytest.mark.parametrize("widths", [(8, 8), (8, 4)])
def test_projections_of_cross_attention_are_layers(widths):
    source = translated(Crosses(*widths), torch.randn(2, 5, 8), torch.randn(2, 7, 8))
    source.code[source.code.index("class Cross(") :].replace('"', "'")
    assert source.layers[0] == source.layers[1]


class Dense(nn.Module):
    """A linear layer of one's own, by a function of `x`, `weight` and `bias`."""

    def __init__(self, compute, *shape):
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.compute(x, self.weight, self.bias)


LINEAR = {
    "x @ w.T + b": (lambda x, w, b: x @ w.T + b, (4, 3)),
    "b + x @ w.t()": (lambda x, w, b: b + torch.matmul(x, w.t()), (4, 3)),
    "x @ w + b": (lambda x, w, b: x @ w + b, (3, 4)),
    "linear(x, w) + b": (lambda x, w, b: nn.functional.linear(x, w) + b, (4, 3)),
    "einsum": (lambda x, w, b: torch.einsum("bld,od->blo", x, w) + b, (4, 3)),
    "einsum of any rank": (lambda x, w, b: torch.einsum("...d,od->...o", x, w) + b, (4, 3)),
    "addmm of rows": (
        lambda x, w, b: torch.addmm(b, x.view(-1, 3), w).view(*x.shape[:-1], 4),
        (3, 4),
    ),
    "mm of rows": (
        lambda x, w, b: torch.mm(x.reshape(-1, 3), w.T).view(*x.shape[:-1], 4) + b,
        (4, 3),
    ),
}


@pytest.mark.nightly_cases("b + x @ w.t()", "x @ w.T + b", "mm of rows")
@pytest.mark.parametrize("way", LINEAR)
def test_products_with_a_weight_are_linear_layers(way):
    compute, shape = LINEAR[way]
    source = translated(nn.Sequential(nn.Tanh(), Dense(compute, *shape)), torch.randn(2, 5, 3))
    assert source.layers == (16, 16)


@pytest.mark.nightly
def test_a_product_among_other_operations_is_a_linear_layer():
    def compute(x, w, b):
        return torch.tanh(x @ w.T + b) * x.sum(-1, keepdim=True)

    source = translated(Dense(compute, 4, 3), torch.randn(2, 5, 3))
    assert source.layers == (16, 16)
    source = translated(Dense(lambda x, w, b: (x @ w).sigmoid() + b, 3, 4), torch.randn(2, 5, 3))
    assert source.layers == (12, 16)


@pytest.mark.daily_cases("<lambda>-shape3")
@pytest.mark.parametrize(
    ("compute", "shape"),
    [
        (lambda x, w, b: x @ w.T + 2 * b, (4, 3)),
        (lambda x, w, b: torch.add(x @ w.T, b, alpha=2), (4, 3)),
        (lambda x, w, b: (x @ w.T) * w.sum() + b, (4, 3)),
        (lambda x, w, b: (x @ w).view(2, 4, 5) + b.view(4, 1), (3, 4)),
        (lambda x, w, b: torch.einsum("bld,do->bol", x, w) + b.view(4, 1), (3, 4)),
        (lambda x, w, b: x[0].mm(w.T).addmm(x[1], w.T) + b, (4, 3)),
        (lambda x, w, b: torch.addmm(b.view(1, 4), x[0], w.T), (4, 3)),
        (lambda x, w, b: torch.einsum("bll,ol->bo", x[:, :3], w) + b, (4, 3)),
    ],
)
def test_what_is_not_quite_a_linear_layer_computes_the_same(compute, shape):
    source = translated(Dense(compute, *shape), torch.randn(2, 5, 3))
    assert source.layers[0] < source.layers[1]


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
    assert isinstance(model.table, nnx.Embed)


@pytest.mark.nightly
def test_a_product_with_the_weight_first_is_a_linear_layer():
    def compute(x, w, b):
        return (w @ torch.tanh(x).mT) * 2 + (w @ x[0].T) + torch.exp(b[:, None])

    source = translated(Dense(compute, 4, 3), torch.randn(2, 5, 3))
    assert source.layers == (0, 16)  # twice used, it stays an array
    source = translated(Dense(lambda x, w, b: w @ x.mT + b[:, None], 4, 3), torch.randn(2, 5, 3))
    assert source.layers == (12, 16)
    source = translated(Dense(lambda x, w, b: w @ x + b[:, None], 4, 5), torch.randn(2, 5, 3))
    assert source.layers == (20, 24)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return x + self.weight[torch.arange(4) - 1]


@pytest.mark.nightly
def test_rows_of_a_parameter_are_an_embedding():
    source = translated(Table(), torch.randn(2, 4, 3))
    assert source.layers == (15, 15)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.total = nn.EmbeddingBag(10, 4, mode="sum")
        self.mean = nn.EmbeddingBag(12, 4, padding_idx=0)

    def forward(self, x):
        return self.total(x), self.mean(x)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [[[1, 2, 2, 0], [0, 0, 0, 0], [3, 0, 4, 9]], [[1], [0], [3]]])
def test_bags_of_rows_are_layers(rows):
    torch.manual_seed(0)
    net = Bags()
    x = torch.tensor(rows)
    model = fmapper.convert(net, "flax", (x,), structure=True)
    for part in (model.total, model.mean):
        assert isinstance(part, nnx.Embed)
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
def test_matrices_of_a_list_are_a_list_of_layers():
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
