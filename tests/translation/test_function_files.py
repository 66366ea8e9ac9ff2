"""Models of torch as files for plain JAX: functions, and their arrays in dicts and lists."""

from __future__ import annotations

import ast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation import run_file  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402
from fmapper_adapters.jax.translation.functions.dialect import _with_buffers  # noqa: E402

MERGED = "    params = merge(params, buffers)"


class Block(nn.Module):
    def __init__(self, dim, dilation):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, padding=dilation, dilation=dilation)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(torch.relu(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.register_buffer("scale", torch.linspace(1, 2, 8))
        self.blocks = nn.ModuleList(Block(8, 2**i) for i in range(3))
        self.mlp = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Tanh())
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = (self.embed(ids) * self.scale).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mlp(x.transpose(1, 2)))


def load(source, module):
    """Runs a file and returns its names, and its trees with the arrays of a module."""
    space = run_file(source)
    state = {key: value.detach().numpy() for key, value in module.state_dict().items()}
    trees = space["load_weights"](space[f"init_{source.name}"](jax.random.key(0)), state)
    return space, trees


def close(found, wanted):
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def written(net):
    return translate(net, "jax", (torch.randint(0, 7, (2, 5)),), train=True)[0]


@pytest.mark.nightly
def test_a_file_is_functions(written):
    tree = ast.parse(written.code)
    names = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    own = ["init_block", "block", "init_mlp", "mlp", "init_net", "net"]
    assert [name for name in names if name in own] == own


@pytest.mark.nightly
def test_it_computes_the_same_for_other_sizes_and_under_jit(net, written):
    space, (params, buffers) = load(written, net)
    net.eval()
    for shape in ((2, 5), (3, 9)):
        ids = torch.randint(0, 7, shape)
        close(jax.jit(space["net"])(params, buffers, ids.numpy()), net(ids))
    x = torch.randn(2, 8, 6)
    close(space["block"](params["blocks"][1], x.numpy(), dilation=2), net.blocks[1](x))


@pytest.mark.nightly
def test_parameters_are_what_is_trained(net, written):
    space, (params, buffers) = load(written, net)
    ids = torch.randint(0, 7, (2, 5))
    grads = jax.grad(lambda p: (space["net"](p, buffers, ids.numpy()) ** 2).sum())(params)
    net.eval()
    (net(ids) ** 2).sum().backward()
    names = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
    }
    own = dict(net.named_parameters())
    assert names.keys() == own.keys()
    for name, leaf in names.items():
        np.testing.assert_allclose(leaf, own[name].grad, rtol=1e-4, atol=1e-4)
    assert [leaf.shape for leaf in jax.tree.leaves(buffers)] == [(8,)]
    net.zero_grad()


@pytest.mark.nightly
def test_what_draws_is_given_a_key(net, written):
    space, trees = load(written, net)
    ids = torch.randint(0, 7, (2, 5)).numpy()
    first, second, third = (space["net"](*trees, ids, key=jax.random.key(s)) for s in (0, 1, 0))
    np.testing.assert_array_equal(first, third)
    assert not np.allclose(first, second)
    assert not np.allclose(first, space["net"](*trees, ids))


@pytest.mark.nightly
def test_parts_that_differ_in_class_are_called_one_after_the_other():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)])
            self.bias = nn.ParameterList([torch.ones(4), torch.zeros(4)])

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x * self.bias[0] + self.bias[1]

    module, x = Mixed().eval(), torch.randn(3, 4)
    source = translate(module, "jax", (x,))[0]
    space, params = load(source, module)
    close(space["mixed"](params, x.numpy()), module(x))


@pytest.mark.nightly
def test_structure_and_changes_are_refused():
    x = (torch.randn(4, 3),)
    with pytest.raises(fmapper.ConversionError, match="structure"):
        fmapper.convert(nn.Linear(3, 2), "jax", x, structure=True)
    with pytest.raises(fmapper.ConversionError, match=r"changes running_mean.*train=False"):
        fmapper.source(nn.BatchNorm1d(3), "jax", x, train=True)


def test_layers_without_a_function_are_written_by_their_operations():
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval()
    code = fmapper.source(layer, "jax", (torch.randn(2, 3, 4),))
    assert "def multihead_attention(" in code


@pytest.mark.nightly
def test_a_proof_runs_in_a_process_without_torch(net, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('this process has no torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    ids = torch.randint(0, 7, (2, 5))
    _, _, proof = translate(net, "jax", (ids,), train=True, proved=True)
    assert proof, proof
    assert {what.split()[0] for what in proof.errors} == {"eval", "train"}


@pytest.mark.nightly
def test_the_row_for_padding_gets_no_gradient():
    module, ids = nn.Sequential(nn.Embedding(5, 3, padding_idx=2)), torch.tensor([[0, 2, 4]])
    module[0].weight.data[2] = 1.0
    source = translate(module, "jax", (ids,))[0]
    space, params = load(source, module)
    found = jax.grad(lambda p: (space["sequential"](p, ids.numpy()) ** 2).sum())(params)
    (module(ids) ** 2).sum().backward()
    (gradient,) = jax.tree.leaves(found)
    close(gradient, module[0].weight.grad)


@pytest.mark.nightly
def test_layers_that_draw_nothing_have_sizes_of_their_own():
    net = nn.Sequential(
        nn.InstanceNorm2d(2, affine=True), nn.Conv2d(2, 3, 1), nn.InstanceNorm2d(3, affine=True)
    )
    x = torch.randn(2, 2, 4, 4)
    made = {}
    exec(fmapper.source(net, "jax", (x,)), made)
    params = made["init_sequential"](jax.random.key(0))
    state = {key: value.detach().numpy() for key, value in net.state_dict().items()}
    found = made["sequential"](made["load_weights"](params, state), x.numpy())
    np.testing.assert_allclose(found, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class Vectors(nn.Module):
    """Has as many arrays as it is told, in a list."""

    def __init__(self, count):
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(count))

    def forward(self, x):
        return x + sum(one * one for one in self.vectors)


def test_buffers_are_there_before_the_first_statement():
    code = "def f(params, x):\n    # x: (batch,)\n    y = g(params)\n    # h(z)\n    return h(y)"
    lines = _with_buffers(code).split("\n")
    assert lines[:3] == ["def f(params, buffers, x):", "    # x: (batch,)", MERGED]
    assert lines[3:] == code.split("\n")[2:]


@pytest.mark.nightly
def test_parts_of_a_list_whose_length_is_told():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(map(Vectors, (1, 2, 3)))

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    module, x = Several(), torch.randn(5, 4)
    source = translate(module, "jax", (x,))
    source = source[0] if isinstance(source, tuple) else source
    space, trees = load(source, module)
    close(space["several"](trees, x.numpy()), module(x))
