"""The steps of training that a proof compares with: dropout is left out, wherever it is."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fmapper_adapters.torch.record.training_steps import training_steps  # noqa: E402

DIALECT = "fmapper_adapters.equinox.translation.dialect"
attention = nn.MultiheadAttention(4, 2, dropout=0.5)
x = torch.linspace(-1, 1, 24).reshape(3, 2, 4)


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (nn.LSTM(4, 3, 2, dropout=0.5), (x,)),
        (nn.GRU(4, 3, 2, dropout=0.5), (nn.utils.rnn.pack_padded_sequence(x, [3, 2]),)),
        (attention, (x, x, x)),
    ],
    ids=["recurrent", "packed", "attention"],
)
def test_dropout_inside_of_layers_is_left_out(module, args):
    run = training_steps(module, args, {}, train=True)
    first, second = run(0.1, 0.0), run(0.1, 0.0)
    assert first.keys() == second.keys()
    assert any(key.startswith("after.") for key in first)
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key])


class Overwriting(nn.Module):
    """Overwrites what its gradient needs, unless it trains."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 3)

    def forward(self, x):
        y = self.dense(x).exp()
        return y + 1 if self.training else y.add_(1)


def test_a_model_without_gradients_has_outputs_and_a_reason():
    found = training_steps(Overwriting(), (x,), {}, train=False)(0.1, 0.0)
    assert set(found) == {"output.0", "refused"}
    assert "inplace operation" in str(found["refused"])
    assert "gradient.dense.weight" in training_steps(Overwriting(), (x,), {}, train=True)(0.1, 0.0)


def test_a_proof_says_where_there_are_no_gradients():
    pytest.importorskip("flax.nnx")
    from fmapper.translation.source import translate

    _, _, proof = translate(Overwriting(), "flax", (x,), train=True, proved=True)
    assert proof
    assert set(proof.errors) == {"eval outputs", "train outputs", "train gradients", "train steps"}
    assert "eval gradients not compared, since the source has none (one of the" in str(proof)


@pytest.mark.parametrize("to", ["flax", "equinox", "jax"])
def test_a_proof_asks_for_no_gradient_where_the_model_trains_nothing(to, monkeypatch):
    pytest.importorskip(to)
    from fmapper.translation.source import translate

    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    net[1].bias.requires_grad_(False)
    _, _, proof = translate(net, to, (x[0],), train=True, proved=True)
    assert proof, str(proof)
    assert proof.errors["train gradients"] < 1e-5
    if to == "equinox":
        monkeypatch.setattr(f"{DIALECT}.frozen_parts", lambda draft: [])
        assert not translate(net, to, (x[0],), proved=True)[2]


def test_layers_that_the_model_does_not_train_stay_as_they_are():
    nnx = pytest.importorskip("flax.nnx")
    import fmapper
    from fmapper.translation.source import translate

    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    net[1].bias.requires_grad_(False)
    found, _, proof = translate(net, "flax", (x[0],), proved=True)
    assert proof, str(proof)
    assert "FROZEN = (" in found.code
    model = fmapper.convert(net, "flax", (x[0],), structure=True)
    trained = nnx.state(model, nnx.Param)
    assert [".".join(map(str, path)) for path, _ in nnx.to_flat_state(trained)] == ["item_1.kernel"]
