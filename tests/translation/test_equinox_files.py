"""Models of torch as files for Equinox: what they compute, how they look, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation import run_file  # noqa: E402
from fmapper.translation.source import translate, translate_proved  # noqa: E402


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        x = x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))
        return self.drop(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, 8, 3), nn.GELU(), nn.Dropout(0.1))
        self.register_buffer("scale", torch.linspace(1, 2, 8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.table = nn.Embedding(5, 8)

    def forward(self, x):
        x = self.stem(x).transpose(1, 2) * self.scale
        for block in self.blocks:
            x = block(x)
        return x @ self.table.weight.T


def load(source, module):
    """Runs a file and returns its model with the arrays of a module."""
    space = run_file(source)
    state = {key: value.detach().numpy() for key, value in module.state_dict().items()}
    return space["load_weights"](space[source.name](key=jax.random.key(0)), state), space


def close(found, wanted):
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def written(net):
    return translate(net, "equinox", (torch.randn(5, 3, 6),), train=True)[0]


@pytest.mark.nightly
def test_a_file_has_layers_of_equinox(net, written):
    model, _ = load(written, net)
    assert isinstance(model.blocks[1].up, eqx.nn.Linear)
    assert written.layers[0] == written.layers[1]  # with the table: it is what x is multiplied by


@pytest.mark.nightly
def test_it_computes_the_same_for_other_sizes_and_under_jit(net, written):
    model, _ = load(written, net)
    net.eval()
    for batch in (2, 7):
        x = torch.randn(batch, 3, 9)
        close(eqx.filter_jit(model)(x.numpy()), net(x))
    part = torch.randn(4, 8)
    close(model.blocks[0](part.numpy()), net.blocks[0](part))


@pytest.mark.nightly
def test_what_draws_is_given_a_key(net, written):
    model, _ = load(written, net)
    x = torch.randn(2, 3, 9).numpy()
    first, second, third = (model(x, key=jax.random.key(seed)) for seed in (0, 1, 0))
    np.testing.assert_array_equal(first, third)
    assert not np.allclose(first, second)
    assert not np.allclose(first, model(x))
    kept = [layer.drop(np.ones((100, 100)), key=jax.random.key(2)) for layer in model.blocks]
    assert all(0.45 < np.mean(np.asarray(one) == 2) < 0.55 for one in kept)


@pytest.mark.nightly
def test_buffers_get_no_gradient(net, written):
    model, _ = load(written, net)
    x = torch.randn(2, 3, 9).numpy()
    gradient = eqx.filter_grad(lambda model: (model(x) ** 2).sum())(model)
    assert not gradient.scale.any()
    assert gradient.table.weight.any()


@pytest.mark.nightly
def test_wrong_shapes_and_missing_names_raise(net, written):
    model, space = load(written, net)
    state = {key: value.detach().numpy() for key, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=r"table.weight has the shape \(8, 5\)"):
        space["load_weights"](model, {**state, "table.weight": state["table.weight"].T})
    weight = state.pop("table.weight")
    with pytest.raises(ValueError, match=r"table.weight"):
        space["load_weights"](model, state)
    same = space["load_weights"](model, state, strict=False)
    np.testing.assert_array_equal(same.table.weight, weight)


@pytest.mark.nightly
def test_transposed_convolutions_and_norms():
    module = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3),
        nn.BatchNorm2d(6),
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
        nn.GroupNorm(2, 4),
        nn.ConvTranspose2d(4, 4, 2, groups=2, dilation=2),
        nn.RMSNorm(12),
    ).eval()
    nn.init.normal_(module[5].weight)
    module[1].running_mean += 0.5
    x = torch.randn(2, 3, 9, 9)
    source, _, _ = translate(module, "equinox", (x,))
    model, _ = load(source, module)
    close(model(x.numpy()), module(x))


@pytest.mark.nightly
def test_convert_gives_the_model_of_that_source(net):
    x = torch.randn(4, 3, 8)
    net.eval()
    model = fmapper.convert(net, "equinox", (x,), structure=True)
    assert isinstance(model, eqx.Module)
    close(model(x.numpy()), net(x))


@pytest.mark.nightly
def test_other_forms_and_changes_are_refused(net):
    x = (torch.randn(4, 3, 8),)
    with pytest.raises(fmapper.ConversionError, match="pass structure=True"):
        fmapper.convert(net, "equinox", x)
    with pytest.raises(fmapper.ConversionError, match=r"changes running_mean.*train=False"):
        fmapper.source(nn.BatchNorm1d(3), "equinox", x, train=True)


@pytest.mark.nightly
def test_a_proof_runs_in_a_process_without_torch(net):
    _, _, proof = translate(net, "equinox", (torch.randn(2, 3, 6),), train=True, proved=True)
    assert proof, proof
    assert {what.split()[0] for what in proof.errors} == {"eval", "train"}


@pytest.mark.nightly
def test_the_row_for_padding_gets_no_gradient():
    module, ids = nn.Sequential(nn.Embedding(5, 3, padding_idx=2)), torch.tensor([[0, 2, 4]])
    module[0].weight.data[2] = 1.0
    model, _ = load(translate(module, "equinox", (ids,))[0], module)
    found = eqx.filter_grad(lambda model: (model(ids.numpy()) ** 2).sum())(model)
    (module(ids) ** 2).sum().backward()
    (gradient,) = jax.tree.leaves(found)
    close(gradient, module[0].weight.grad)


class Path(nn.Module):
    """Stochastic depth."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training:
            return x
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * mask / (1 - self.rate)


class Deep(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.up = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.path = Path(rate) if rate else nn.Identity()

    def forward(self, x):
        y = self.mix(self.norm1(x))
        y = y.sigmoid() * x
        x = x + self.path(y)
        y = self.up(self.norm2(x)).relu()
        y = self.down(y)
        return x + self.path(y)


class Depths(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Deep(8, rate) for rate in (0.0, 0.1, 0.2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.nightly
def test_blocks_with_and_without_stochastic_depth_are_one_class_in_both_modes():
    source, proof, reason = translate_proved(Depths(), "equinox", (torch.randn(4, 8),))
    assert proof, proof
    assert not reason
    assert source.modes == ("eval", "train")


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.rand(4))
        self.register_buffer("once", torch.rand(4))
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def forward(self, x):
        mask = self.linear(x)
        kept = mask * self.mask + self.once
        return (kept + x * (1 - self.mask))[:, self.order]


@pytest.mark.nightly
def test_gradients_to_an_array_are_stopped_once():
    torch.manual_seed(0)
    source, proof, _ = translate_proved(Masked(), "equinox", (torch.randn(3, 4),))
    assert proof
    [line.strip() for line in source.code.splitlines() if "stop_gradient(self" in line]
