"""The steps of training that a proof compares with: dropout is left out, wherever it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate_proved  # noqa: E402
from fmapper.verification.files.descent import descent  # noqa: E402
from fmapper_adapters.torch.trials.trial import TorchTrial  # noqa: E402

DIALECT = "fmapper_adapters.equinox.translation.dialect"
attention = nn.MultiheadAttention(4, 2, dropout=0.5)
x = torch.linspace(-1, 1, 24).reshape(3, 2, 4)


def training_steps(module, args, kwargs, *, train):
    return descent(TorchTrial(module, args, kwargs, train=train))


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
    assert set(found) == {"output.0", "draws", "refused"}
    assert "inplace operation" in str(found["refused"])
    assert "gradient.dense.weight" in training_steps(Overwriting(), (x,), {}, train=True)(0.1, 0.0)


@pytest.mark.nightly
def test_a_proof_says_where_there_are_no_gradients():
    pytest.importorskip("flax.nnx")
    from fmapper.translation.source import translate

    _, _, proof = translate(Overwriting(), "flax", (x,), train=True, proved=True)
    assert proof
    assert set(proof.errors) == {"eval outputs", "train outputs", "train gradients", "train steps"}
    assert "eval gradients not compared, since the source has none (one of the" in str(proof)


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_layers_that_the_model_does_not_train_stay_as_they_are():
    nnx = pytest.importorskip("flax.nnx")
    import fmapper
    from fmapper.translation.source import translate

    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    net[1].bias.requires_grad_(False)
    _found, _, proof = translate(net, "flax", (x[0],), proved=True)
    assert proof, str(proof)
    model = fmapper.convert(net, "flax", (x[0],), structure=True)
    trained = nnx.state(model, nnx.Param)
    assert [".".join(map(str, path)) for path, _ in nnx.to_flat_state(trained)] == ["item_1.kernel"]


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        return self.linear(torch.fft.irfft(torch.fft.rfft(x) * self.w, n=8))


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox", "jax"])
def test_complex_parameters_learn_as_in_torch(target):
    pytest.importorskip(target)
    torch.manual_seed(0)
    _, proof, reason = translate_proved(Spectral(), target, (torch.randn(2, 8),))
    assert proof, reason
    assert "train steps" in proof.errors


@pytest.mark.nightly
def test_complex_parameters_of_jax_learn_in_torch():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jax.random.normal(rngs.params(), (5,), jnp.complex64))

        def __call__(self, x):
            return jnp.fft.irfft(jnp.fft.rfft(x) * self.w[...], 8)

    x = jnp.cos(jnp.arange(16.0)).reshape(2, 8)
    _, proof, reason = translate_proved(Net(nnx.Rngs(0)), "torch", (x,))
    assert proof, reason
    assert "gradient.w" in {key.partition(".")[2] for key in proof.data}


class Looks(nn.Module):
    """Looks at an image through a grid, which is at first its own points."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(16, 6)
        nn.init.zeros_(self.turn.weight)
        self.turn.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])

    def forward(self, x):
        theta = self.turn(x.flatten(1)).view(-1, 2, 3)
        grid = nn.functional.affine_grid(theta, x.size(), align_corners=False)
        return nn.functional.grid_sample(x, grid, align_corners=False)


@pytest.mark.nightly
def test_weights_at_a_bend_are_moved_before_gradients_are_compared():
    torch.manual_seed(0)
    _, proof, reason = translate_proved(Looks(), "flax", (torch.randn(2, 1, 4, 4),))
    assert proof, reason
    assert proof.away
    assert "with weights moved by 1.6%" in str(proof)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_not_proved_and_the_message_says_what_to_do(dtype):
    net, x = nn.Sequential(nn.Linear(3, 2)).to(dtype), torch.ones(2, 3, dtype=dtype)
    with pytest.raises(
        fmapper.ConversionError, match=r"0\.weight is of .*float16.* fmapper.source"
    ):
        translate_proved(net, "flax", (x,))
    assert "param_dtype" in fmapper.source(net, "flax", (x,))
    with pytest.raises(
        fmapper.ConversionError, match="in float32; or write this one for evaluation"
    ):
        fmapper.source(net, "flax", (x,), train=True)
    model = fmapper.convert(net, "flax", (x,), structure=True)
    found = np.asarray(model(fmapper.to_jax(x))).astype(np.float32)
    np.testing.assert_allclose(found, net(x).detach().float(), rtol=0.02, atol=0.02)


class Probabilities(nn.Module):
    """Holds nothing, draws nothing, and differs in its modes."""

    def forward(self, x):
        return x if self.training else x.softmax(-1)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


class Turned(nn.Module):
    """Gives a number that is 0 but for roundings, as flows do before they are trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])

    def forward(self, x):
        return x @ self.weight, torch.linalg.slogdet(self.weight)[1]


@pytest.mark.nightly
def test_weights_are_moved_before_a_rounding_is_compared():
    _, proof, _ = translate_proved(Turned(), "flax", (x,))
    assert proof, proof
    assert "outputs or gradients" in str(proof)


@pytest.mark.parametrize(("last", "differs"), [(Probabilities(), True), (Noise(), False)])
def test_noise_is_left_out_and_what_draws_nothing_is_not(last, differs):
    model = nn.Sequential(nn.Linear(4, 3), last)
    outputs = [
        training_steps(model, (x,), {}, train=train)(0.1, 0.0)["output.0"]
        for train in (False, True)
    ]
    assert (outputs[0] != outputs[1]).any() == differs


@pytest.mark.nightly
def test_a_part_without_arrays_is_proved_in_both_modes():
    model = nn.Sequential(nn.Linear(4, 3), Probabilities())
    source, proof, reason = translate_proved(model, "flax", (x,))
    assert proof, proof
    assert not reason
    assert source.modes == ("eval", "train")


@dataclasses.dataclass
class Output:
    """What a model gives that torch knows no pytree for."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        logits = self.linear(x)
        return Output(logits=logits, loss=logits.square().mean())


@pytest.mark.nightly
def test_what_objects_hold_is_compared():
    found = training_steps(Scored(), (torch.randn(2, 4),), {}, train=True)(0.1, 0.0)
    assert found["output.0"].shape == (2, 3)
    assert found["output.1"].shape == ()
    _, proof, reason = translate_proved(Scored(), "flax", (torch.randn(2, 4),), {})
    assert proof
    assert reason == ""
