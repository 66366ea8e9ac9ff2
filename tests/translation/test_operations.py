"""Operations as a person would write them in JAX; none of them as its lowering."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402


class Each(nn.Module):
    """Several functions of one input."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def forward(self, x, *more):
        return tuple(function(x, *more) for function in self.functions)


def printed(inputs, *functions):
    """Returns the code of functions, once their results are compared."""
    module = Each(*functions)
    code = fmapper.source(module, "flax", inputs, dynamic_shapes=None)
    space = {"__name__": "translated"}
    exec(compile(code, "translated.py", "exec"), space)
    model = space["Each"](rngs=nnx.Rngs(0))
    found = jax.tree.leaves(model(*(x.numpy() for x in inputs)))
    wanted = [x for x in fmapper.fleaves(module(*inputs)) if x is not None]
    for at, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_allclose(
            np.asarray(mine), theirs.detach().numpy(), rtol=2e-5, atol=2e-5, err_msg=str(at)
        )
    assert not re.search("^def _", code, re.MULTILINE), code
    return code


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_images_of_sizes_that_vary_grow_by_a_factor(mode):
    net, x = (
        Each(lambda x: F.interpolate(x, scale_factor=(2, 3), mode=mode)),
        torch.randn(2, 3, 4, 6, dtype=torch.float64),
    )
    sizes = {"x": {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}}
    code = fmapper.source(net, "flax", (x,), dynamic_shapes=sizes)
    space = {"__name__": "translated"}
    exec(compile(code, "translated.py", "exec"), space)
    model = space["Each"](rngs=nnx.Rngs(0))
    with jax.enable_x64(True):
        for given in (x, torch.randn(3, 3, 5, 7, dtype=torch.float64)):
            (found,), (wanted,) = model(given.numpy()), net(given)
            np.testing.assert_allclose(found, wanted, atol=1e-14)


@pytest.mark.nightly
def test_derivatives_of_lowerings_are_written_with_them():
    def cross(x):
        return F.binary_cross_entropy(x, x.detach() / 2, reduction="sum") + torch.logit(x).sum()

    module, x = Each(cross), torch.tensor([0.5, 0.0, 1.0], requires_grad=True)
    code = fmapper.source(module, "flax", (x.detach(),), dynamic_shapes=None)
    space = {"__name__": "translated"}
    exec(compile(code, "translated.py", "exec"), space)
    model = space["Each"](rngs=nnx.Rngs(0))
    module(x)[0].backward()
    got = jax.grad(lambda x: model(x)[0])(jax.numpy.asarray(x.detach().numpy()))
    np.testing.assert_allclose(got, x.grad, rtol=1e-5)


class Positions(nn.Module):
    """Adds a table, which its state dict does not have unless it is told to."""

    def __init__(self, table, persistent=False):
        super().__init__()
        self.register_buffer("table", table, persistent=persistent)

    def forward(self, x):
        return x + self.table[..., : x.shape[-2], :]


def tables_of_sines():
    positions = torch.arange(1024.0)[:, None]
    few = positions * (1 / 10000 ** (torch.arange(0, 8, 2) / 8))
    yield torch.cat([few.sin(), few.cos()], dim=1)  # GPT-J
    many = positions * torch.exp(torch.arange(16.0) * (-np.log(10000.0) / 15))
    padded = torch.cat([many.sin(), many.cos()], dim=1)
    padded[1] = 0  # fairseq
    yield padded
    yield torch.stack([many.sin(), many.cos()], dim=-1).reshape(1, 1024, 32)  # Vaswani et al.


@pytest.mark.nightly
@pytest.mark.parametrize("table", [*tables_of_sines()], ids=["few", "padded", "in turn"])
def test_sines_of_positions_are_computed_to_a_bit_of_their_angles(table):
    code = fmapper.source(Positions(table), "flax", (torch.zeros(1, 1024, table.shape[-1]),))
    space = {"__name__": "translated"}
    exec(compile(code, "translated.py", "exec"), space)
    found = space["Positions"](rngs=nnx.Rngs(0)).table[...]
    bits = 1e-7 * (1 + np.arange(1024)[:, None])  # of an angle in float32
    assert (np.abs(found - table.numpy()) <= bits).all()


def test_tables_of_other_numbers_stay_numbers():
    table = next(tables_of_sines())
    table[700, 3] += 1e-3
    code = fmapper.source(Positions(table), "flax", (torch.zeros(1, 1024, 8),))
    assert "sinusoids" not in code


@pytest.mark.nightly
@pytest.mark.parametrize("persistent", [False, True])
def test_long_tables_that_no_state_dict_has_are_exact(persistent):
    powers = torch.exp(torch.arange(0, 512, 2.0) * (-np.log(10000.0) / 512))
    angles = torch.arange(6000.0)[:, None] * powers
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    model = Positions(table, persistent)
    code = fmapper.source(model, "flax", (torch.zeros(1, 16, 512),))
    space = {"__name__": "translated"}
    exec(compile(code, "translated.py", "exec"), space)
    found = space["Positions"](rngs=nnx.Rngs(0))
    state = {name: x.numpy() for name, x in model.state_dict().items()}
    found = space["load_weights"](found, state).table[...]
    assert np.abs(found - table.numpy()).max() <= 5e-5


class Banded(torch.nn.Module):
    """Has a table in float64's digits, and the mask of a window."""

    def __init__(self):
        super().__init__()
        powers = np.power(10000, 2 * (np.arange(16) // 2) / 16)
        angles = np.arange(2000)[:, None] / powers
        angles[:, 0::2], angles[:, 1::2] = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
        self.table = torch.tensor(angles, dtype=torch.float32)[None]
        mask = torch.tril(torch.ones(40, 40, dtype=torch.bool))
        mask = torch.bitwise_xor(mask, torch.tril(mask, -8))
        self.register_buffer("mask", mask[None], persistent=False)

    def forward(self, x):
        return torch.where(self.mask, x, 0.0) @ self.table[:, :40]


@pytest.mark.nightly
def test_tables_in_float64_and_masks_of_windows_are_computed():
    x = torch.randn(2, 40, 40)
    fmapper.source(Banded(), "flax", (x,), dynamic_shapes=None)
    model = fmapper.convert(Banded(), "flax", (x,), dynamic_shapes=None, structure=True)
    np.testing.assert_allclose(model(x.numpy()), Banded()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["var_mean", "std_mean"])
def test_a_spread_and_its_mean(name):
    function = getattr(torch, name)
    printed(
        (torch.randn(2, 3, 4),),
        lambda x: function(x.exp(), -1),
        lambda x: function(x.sin(), (0, 2), correction=0, keepdim=True),
        lambda x: function(x.cos()),
    )
    others = Each(
        lambda x: function(torch.complex(x, x.sin()), 1)[0],
        lambda x: function(x, 1, correction=0.5),
    )
    x = torch.randn(2, 3, 4)
    model = fmapper.convert(others, "flax", (x,), structure=True)
    for mine, theirs in zip(
        jax.tree.leaves(model(x.numpy())), fmapper.fleaves(others(x)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_every_lowering_can_be_written_to_a_file():
    """Each alone: one of them may need what another one has brought."""
    from fmapper_adapters.flax.translation.dialect import FlaxDialect
    from fmapper_adapters.jax.aten import table

    table.load()
    assert len(table.LOWERINGS) > 500
    for op, lowering in table.LOWERINGS.items():
        assert FlaxDialect()._embedded.add(lowering.function), op


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("net", "x"),
    [(nn.GRU(4, 3), torch.randn(5, 4)), (nn.LSTM(4, 6, proj_size=3), torch.randn(5, 2, 4))],
    ids=["one sequence", "projected"],
)
def test_recurrent_layers_that_are_none_of_flax(net, x):
    model = fmapper.convert(nn.Sequential(net), "flax", (x,), structure=True)
    found, (wanted, _) = model(x.numpy()), nn.Sequential(net)(x)
    np.testing.assert_allclose(found[0], wanted.detach(), rtol=1e-5, atol=1e-6)
