"""Idioms of public models: skips, caches in tuples, blocks under two names, calls in place."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate_proved  # noqa: E402


def translate(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, str]:
    """Returns the model of Flax and its file, after comparing the two."""
    module.eval()
    wanted = copy.deepcopy(module)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    model = fmapper.convert(module, "flax", args, kwargs, structure=True)
    numbers = torch.utils._pytree.tree_map(lambda t: t.numpy(), (args, kwargs))
    found = model(*numbers[0], **numbers[1])
    for mine, theirs in zip(leaves(found), leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    return model, fmapper.source(model)


def leaves(value: Any) -> list[Any]:
    value = list(value.values()) if isinstance(value, dict) else value
    if isinstance(value, tuple | list):
        return [leaf for one in value for leaf in leaves(one)]
    return [value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)]


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Any, layer_past: Any = None) -> Any:
        q, k, v = self.qkv(x).split(x.shape[-1], dim=2)
        if layer_past is not None:
            k = torch.cat((layer_past[0], k), dim=1)
            v = torch.cat((layer_past[1], v), dim=1)
        present = (k, v)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v, present


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = Attention(dim)

    def forward(self, x: Any, layer_past: Any = None) -> Any:
        a, present = self.attn(self.norm(x), layer_past)
        return x + a, present


class Decoder(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(dim) for _ in range(3))

    def forward(self, x: Any, past: Any = None) -> Any:
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, past[i] if past is not None else None)
            presents.append(present)
        return torch.cat([x, x], dim=-1), presents


@pytest.mark.nightly
def test_tuples_within_results_keep_their_names() -> None:
    model, _code = translate(Decoder(), torch.randn(2, 4, 8))
    x = np.ones((2, 4, 8), np.float32)
    _, (k, v) = model.h[0](x)
    assert k.shape == v.shape == (2, 4, 8)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3), nn.LeakyReLU(0.1, inplace=True),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.conv(x)


@pytest.mark.nightly
def test_activations_in_place_stay_in_their_sequence() -> None:
    model, _code = translate(InPlace(), torch.randn(2, 3, 8, 8))
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype(np.float32)
    assert np.asarray(model.conv[1](x)).min() < 0  # it is what it was before the activation


class Named(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        conv = nn.Conv1d(4, 4, 2, padding=dilation, dilation=dilation)
        self.conv1 = nn.utils.parametrizations.weight_norm(conv)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv1d(4, 4, 1)
        self.net = nn.Sequential(self.conv1, self.relu1, self.conv2)

    def forward(self, x: Any) -> Any:
        return self.net(x)[..., : x.shape[-1]]


@pytest.mark.nightly
def test_parts_have_their_second_name_in_a_sequence() -> None:
    module = nn.Sequential(Named(1), Named(2))
    model, _ = translate(module, torch.randn(2, 4, 10))
    x = torch.randn(2, 4, 10)
    found = model[0].net(x.numpy())
    np.testing.assert_allclose(found, module[0].net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(),
            nn.Linear(16, 4), nn.BatchNorm1d(4, affine=False),
        )  # fmt: skip

    def forward(self, left: Any, right: Any) -> Any:
        return self.net(left), self.net(right)


@pytest.mark.nightly
def test_a_normalisation_of_two_batches_is_one_layer_that_each_updates() -> None:
    nnx = pytest.importorskip("flax.nnx")
    module, given = Siamese(), (torch.randn(6, 3, 4, 4), 3 * torch.randn(6, 3, 4, 4) + 1)
    code = fmapper.source(module, "flax", given, train=True, dynamic_shapes=None)
    space: dict[str, Any] = {}
    exec(code, space)
    model = space["Siamese"](rngs=nnx.Rngs(0))
    space["load_weights"](model, {k: v.numpy() for k, v in module.state_dict().items()})
    for _ in range(2):
        found = model(*(one.numpy() for one in given))
        for mine, theirs in zip(found, module(*given), strict=True):
            np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)
    for at in (1, 5):
        for mine, theirs in (("mean", "running_mean"), ("var", "running_var")):
            wanted = getattr(module.net[at], theirs).numpy()
            np.testing.assert_allclose(getattr(model.net[at], mine)[...], wanted, rtol=1e-4)


class Loss(nn.Module):
    def forward(self, x: Any, target: Any) -> Any:
        loss = nn.functional.cross_entropy(x.flatten(0, 1), target.flatten(), ignore_index=-1)
        return x, loss


@pytest.mark.nightly
def test_cross_entropy_reads_as_a_loss() -> None:
    target = torch.tensor([[1, -1, 4], [0, 2, 2]])
    _, code = translate(Loss(), torch.randn(2, 3, 5), target)
    space: dict[str, Any] = {}
    exec(code, space)
    bad = space["nll_loss"](np.zeros((3, 5), np.float32), np.array([1, 5, 2]))
    assert np.isnan(bad)
    assert np.isnan(space["nll_loss"](np.zeros((3, 5), np.float32), np.array([1, -5, 2])))


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["flax", "equinox", "jax"])
@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"kernel_size": 3, "output_padding": 1}])
def test_transposed_convolutions_have_the_padding_of_torch(
    to: str, options: dict[str, int]
) -> None:
    pytest.importorskip(to)
    net = nn.Sequential(nn.ConvTranspose2d(3, 4, **{"kernel_size": 2, "stride": 2, **options}))
    x = torch.randn(2, 3, 5, 6)
    model = fmapper.convert(net, to, (x,), **({} if to == "jax" else {"structure": True}))
    want = net(x).detach().numpy()
    np.testing.assert_allclose(model(x.numpy()), want, rtol=1e-4, atol=1e-5)
    assert re.search("ConvTranspose|conv_transpose", fmapper.source(net, to, (x,)))


class Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, h: torch.Tensor, edges: list[torch.Tensor]) -> torch.Tensor:
        row, col = edges
        told = torch.zeros(row.shape[0], 4) + self.dense(h[row] - h[col])
        return torch.zeros_like(h).index_add(0, row, told * row.shape[0])


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Edges() for _ in range(2))

    def forward(self, h: torch.Tensor, edges: list[torch.Tensor]) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h, edges)
        return h


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
def test_a_list_is_taken_apart_before_sizes_of_its_items_are_read() -> None:
    edges = [torch.tensor([0, 1, 2, 0, 3]), torch.tensor([1, 2, 3, 3, 0])]
    net, h = Graph(), torch.randn(4, 4)
    model = fmapper.convert(net, "flax", (h, edges), structure=True, dynamic_shapes="auto")
    other = [torch.tensor([0, 1, 2]), torch.tensor([4, 3, 0])]
    for nodes, pair in ((h, edges), (torch.randn(5, 4), other)):
        found = model(nodes.numpy(), [one.numpy() for one in pair])
        wanted = net(nodes, pair).detach().numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


class Recalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        query, value = self.dense(torch.cat([memory, x], 0)).chunk(2, dim=-1)
        return query[-x.size(0) :] + value.mean(0)


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recalls() for _ in range(2))

    def forward(self, x: torch.Tensor, memories: list[torch.Tensor]) -> torch.Tensor:
        for layer, memory in zip(self.layers, memories, strict=True):
            x = layer(x, memory)
        return x


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
def test_a_negative_size_is_computed_in_each_part() -> None:
    net = Memory()
    given = [(torch.randn(n, 2, 4), [torch.randn(m, 2, 4)] * 2) for n, m in ((3, 5), (4, 2))]
    model = fmapper.convert(net, "flax", given[0], structure=True, dynamic_shapes="auto")
    for x, memories in given:
        wanted = net(x, memories).detach().numpy()
        found = model(x.numpy(), [one.numpy() for one in memories])
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        part = model.layers[0](x.numpy(), memories[0].numpy())
        wanted = net.layers[0](x, memories[0]).detach().numpy()
        np.testing.assert_allclose(part, wanted, rtol=1e-4, atol=1e-5)


class Nearest(nn.Module):
    """Copies elements and rows that masks pick."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = self.dense(x), self.dense(y).exp()
        nearer = y < x
        x[nearer] = y[nearer]
        rows = x.sum(-1) > 4
        x[rows] = y[rows]
        columns = y[0] > 1
        x[:, columns] = y[:, columns]
        kept = y[rows]
        y.mul_(2)
        x[rows] = kept  # as they were
        return x * y


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")
def test_copies_by_a_mask_are_choices() -> None:
    class Copies(Nearest):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x, y = self.dense(x), self.dense(y).exp()
            nearer = y < x
            x[nearer] = y[nearer]
            rows = x.sum(-1) > 4
            x[rows] = y[rows]
            columns = y[0] > 1
            x[:, columns] = y[:, columns]
            return x * y

    net, x, y = Copies(), 3 * torch.randn(6, 4), 3 * torch.randn(6, 4)
    model = fmapper.convert(net, "flax", (x, y), structure=True, dynamic_shapes="auto")
    fmapper.source(model)
    for a, b in ((x, y), (torch.randn(9, 4), torch.randn(9, 4))):
        wanted = net(a, b).detach().numpy()
        np.testing.assert_allclose(model(a.numpy(), b.numpy()), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_rows_that_were_picked_before_a_change_are_copied_as_they_were() -> None:
    translate(Nearest(), 3 * torch.randn(6, 4), 3 * torch.randn(6, 4))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, x: Any) -> Any:
        return x + self.table(torch.arange(x.shape[-1]))


class Positioned(nn.Module):
    def __init__(self, position: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.position = position

    def forward(self, x: Any) -> Any:
        return self.position(self.linear(x))


class Shared(nn.Module):
    """Gives its own part to others, whose names come before its own in the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.relative = Table()
        self.layers = nn.ModuleList([Positioned(self.relative) for _ in range(2)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.relative(x)


@pytest.mark.nightly
def test_weights_of_a_part_that_others_are_given_have_one_name() -> None:
    torch.manual_seed(0)
    _, proof, reason = translate_proved(Shared(), "flax", (torch.randn(3, 5, 5),))
    assert proof
    assert not reason
