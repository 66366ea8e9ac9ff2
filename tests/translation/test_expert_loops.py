"""Models that pick rows by their values, as experts do, in files that are compiled."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.up = nn.Parameter(torch.randn(3, 4, 5))
        self.down = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        with torch.no_grad():
            mask = nn.functional.one_hot(chosen, num_classes=3).permute(2, 1, 0)
            hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        out = torch.zeros_like(x)
        for row in hit:
            expert = row[0]
            place, token = torch.where(mask[expert])
            rows = nn.functional.silu(x[token] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, token, rows * weights[token, place, None])
        return out


class Picked(nn.Module):
    def forward(self, x):
        return torch.nonzero(x[:, 0] > 0) * 2


@pytest.mark.nightly
def test_rows_of_experts_take_the_size_of_their_mask():
    torch.manual_seed(0)
    net = Experts()
    found, _, proof = translate(net, "flax", (torch.randn(6, 4),), proved=True)
    assert proof, str(proof)
    model = fmapper.convert(net, "flax", (torch.randn(6, 4),), structure=True)
    x = torch.randn(9, 4) if "check_shapes((x, '_ 4'))" in found.code else torch.randn(6, 4)
    gave = np.asarray(nnx.jit(lambda model, x: model(x))(model, x.numpy()))
    np.testing.assert_allclose(gave, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_rows_that_values_count_are_no_result():
    with pytest.raises(fmapper.ConversionError, match="number depends on values") as told:
        fmapper.source(Picked(), "flax", (torch.randn(6, 4),))
    assert "torch.where(mask, a, b)" in str(told.value)
    assert "test_expert_loops.py" in str(told.value)


class Picks(nn.Module):
    def forward(self, x, ids):
        return x[ids == 0]


class Adapted(nn.Module):
    """The layer of a language computes the rows of that language, as in X-MOD."""

    def __init__(self, picks=None):
        super().__init__()
        self.adapter = nn.Linear(3, 3)
        self.picks = picks

    def forward(self, x, ids):
        rows = x[ids == 0] if self.picks is None else self.picks(x, ids)
        new = torch.zeros_like(x)
        new[ids == 0] = self.adapter(rows)
        return new + x


@pytest.mark.nightly
def test_parts_are_given_padded_rows():
    inputs = torch.randn(4, 5, 3), torch.tensor([0, 1, 0, 2])
    _source, _, proof = translate(Adapted(), "flax", inputs, None, None, proved=True)
    assert proof


def test_a_part_that_makes_rows_returns_no_padding():
    inputs = torch.randn(4, 5, 3), torch.tensor([0, 1, 0, 2])
    with pytest.warns(fmapper.NotCompiledWarning):
        code = translate(Adapted(Picks()), "flax", inputs, None, None)[0].code
    assert "_nonzero_static(" not in code


class ByMasks(nn.Module):
    """Gives each expert its rows by a mask, and the same mask in another shape."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        rows, out = x.view(-1, 4), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).any(-1)
            flat = mask.view(-1)
            if flat.any():
                out[mask] += torch.tanh(expert(rows[flat])) * weights[..., :1].reshape(-1, 1)[flat]
        return out


@pytest.mark.nightly
def test_experts_by_masks_are_right_for_other_rows_than_those_of_the_examples():
    torch.manual_seed(0)
    net, x = ByMasks(), torch.randn(2, 5, 4)
    model = fmapper.convert(net, "jax", (x,))
    others = [torch.randn(2, 5, 4), torch.ones(2, 5, 4), -3 * x]
    counts = {tuple((net.gate(one).topk(2, -1)[1] == i).sum().item() for i in range(3))
              for one in (x, *others)}  # fmt: skip
    assert len(counts) > 1
    assert any(0 in one for one in counts)
    for one in (x, *others):
        found = jax.jit(model)(one.numpy())
        np.testing.assert_allclose(found, net(one).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_a_file_of_experts_by_masks_fixes_the_sizes_and_says_so():
    torch.manual_seed(0)
    found, program, proof = translate(ByMasks(), "flax", (torch.randn(2, 5, 4),), {}, proved=True)
    assert proof, str(proof)
    assert all(isinstance(size, int) for one in program.inputs for size in one.shape)
    (told,) = found.fixed
    assert told.startswith("all sizes are those of the examples")
    assert "test_expert_loops.py" in told


@pytest.mark.nightly
def test_a_structured_model_of_experts_by_masks_warns_that_its_sizes_are_fixed():
    torch.manual_seed(0)
    net, x = ByMasks(), torch.randn(2, 5, 4)
    told = "all sizes are those of the examples"
    with (
        pytest.warns(fmapper.NotCompiledWarning),
        pytest.warns(fmapper.FixedSizeWarning, match=told),
    ):
        model = fmapper.convert(net, "flax", (x,), structure=True, dynamic_shapes="auto")
    found = nnx.jit(lambda model, x: model(x))(model, x.numpy())
    np.testing.assert_allclose(found, net(x).detach(), rtol=1e-5, atol=1e-6)


class ByOthers(nn.Module):
    """Has a mask of another length: it holds nothing about the rows of the first."""

    def forward(self, x):
        mask = x[:, 0] > 0
        if mask[:2].any():
            x = x.clone()
            x[mask] += 1
        return x


@pytest.mark.nightly
def test_a_part_of_a_mask_is_no_other_shape_of_it():
    net, x = ByOthers(), torch.tensor([[1.0], [1.0], [1.0], [1.0]])
    model = fmapper.convert(net, "jax", (x,), specialize=True)
    with pytest.raises(fmapper.ProgramInputError, match="violate"):
        model(np.array([[-1.0], [-1.0], [1.0], [1.0]], np.float32))
