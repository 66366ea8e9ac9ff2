"""One file for both modes: what cannot be that is refused, and models are compared."""

import random
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import fmapper
from fmapper.translation.source import translate, translate_proved
from fmapper.verification.files import proof
from fmapper_adapters.torch.adapter import TorchAdapter
from fmapper_adapters.torch.translation import build


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) * (2 if self.training else 1)


@pytest.mark.nightly
def test_modes_that_are_two_programs_are_refused_where_a_file_cannot_have_both():
    x = torch.randn(4, 3)
    with pytest.raises(fmapper.ConversionError, match="in evaluation is another program"):
        fmapper.source(Doubled(), "jax", (x,), train=True)


@pytest.mark.nightly
def test_a_file_for_flax_has_both_modes():
    x = torch.randn(4, 3)
    fmapper.source(Doubled(), "flax", (x,), train=True)
    net = Doubled()
    model = fmapper.convert(net, "flax", (x,), structure=True, train=True)
    for mode in ("train", "eval"):
        getattr(net, mode)(), getattr(model, mode)()
        np.testing.assert_allclose(model(x.numpy()), net(x).detach(), rtol=1e-5, atol=1e-6)
    assert "deterministic" not in fmapper.source(Doubled(), "flax", (x,))


@pytest.mark.nightly
def test_a_file_for_equinox_has_both_modes():
    eqx = pytest.importorskip("equinox")
    x = torch.randn(4, 3)
    fmapper.source(Doubled(), "equinox", (x,), train=True)
    net = Doubled()
    model = fmapper.convert(net.eval(), "equinox", (x,), structure=True, train=True)
    for mode in ("eval", "train"):
        getattr(net, mode)()
        model = eqx.nn.inference_mode(model, mode == "eval")
        np.testing.assert_allclose(model(x.numpy()), net(x).detach(), rtol=1e-5, atol=1e-6)
    assert "inference" not in fmapper.source(Doubled(), "equinox", (x,))


class Gate(nn.Module):
    """Draws in training alone, and reads a size once in evaluation, twice in training."""

    def __init__(self):
        super().__init__()
        self.gate, self.values = nn.Linear(4, 3), nn.Linear(4, 12)

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            weights = nn.functional.gumbel_softmax(logits)
        else:
            weights = nn.functional.one_hot(logits.argmax(-1), 3).to(x.dtype)
        return (weights.unsqueeze(-1) * self.values(x).view(x.shape[0], 3, 4)).sum(1)


class Gates(nn.Module):
    """Has parts that take keys in training alone, and dropout as a function."""

    def __init__(self):
        super().__init__()
        self.leave = nn.Linear(4, 2)
        self.gates = nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x):
        for gate in self.gates:
            x = gate(x)
        return nn.functional.dropout(self.leave(x), 0.2, training=self.training)


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["equinox", "flax"])
def test_what_takes_keys_in_training_alone_is_proved_in_both_modes(to):
    pytest.importorskip("equinox")
    source, proof, reason = translate_proved(Gates(), to, (torch.randn(6, 4),))
    assert proof, proof
    assert not reason
    assert source.modes == ("eval", "train")


class Part(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.linear, self.rate = nn.Linear(4, 4), rate

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.training:
            y = y * torch.bernoulli(torch.full((x.shape[0], 1), 1 - self.rate)) / (1 - self.rate)
        return x + y


class WithHead(nn.Module):
    """Has a head for training, stochastic depth, dropout as a function and running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.parts = nn.ModuleList(Part(0.1 * (i + 1)) for i in range(3))
        self.head, self.other = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(x)
        for part in self.parts:
            x = part(x)
        x = nn.functional.dropout(x, 0.2, training=self.training)
        if self.training:
            return self.head(x), self.other(x)
        return self.head(x).softmax(-1)


@pytest.mark.nightly
def test_parts_and_results_for_training_alone_are_proved_in_both_modes():
    source, proof, reason = translate_proved(WithHead(), "flax", (torch.randn(6, 4),))
    assert proof, proof
    assert not reason
    assert source.modes == ("eval", "train")


class InLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            y = torch.relu(layer(x))
            if self.training:
                y = y * 2
            x = x + y
        return x


@pytest.mark.nightly
def test_what_differs_in_a_loop_is_below_a_condition_in_the_loop():
    _source, proof, reason = translate_proved(InLoop(), "flax", (torch.randn(6, 4),))
    assert proof, reason


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, shift=None):
        x = self.linear(x)
        return x if shift is None else x + shift


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = Shifted()
        self.leave = nn.Linear(4, 2)

    def mix(self, x):
        if not self.training:
            return x
        mean, spread = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        share = torch.rand(x.shape[0], 1)
        return (x - mean) / spread * share + mean * (1 - share)

    def forward(self, x):
        given = (x, x.mean(0)) if self.training else (x,)
        return self.leave(self.mix(torch.relu(self.enter(*given))))


@pytest.mark.nightly
def test_a_part_that_is_another_one_in_evaluation_is_the_reason_for_one_mode():
    source, proof, reason = translate_proved(Mixed(), "flax", (torch.randn(6, 4),))
    assert proof
    assert source.modes == ("eval",)
    assert "enter: its parts or arguments are others in evaluation" in reason


@pytest.mark.nightly
def test_a_model_in_evaluation_takes_a_single_example():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    settings = {"structure": True, "train": True, "dynamic_shapes": ["batch, _"]}
    model = fmapper.convert(net, "flax", (torch.randn(5, 3),), **settings)
    model.eval()
    x = torch.ones(1, 3)
    np.testing.assert_allclose(model(x.numpy()), net.eval()(x).detach(), rtol=1e-5, atol=1e-6)
    model.train()
    with pytest.raises(ValueError, match="has one value, and no variance"):
        model(x.numpy())


@pytest.mark.nightly
def test_an_average_over_all_batches_is_refused_for_training_by_its_name():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(fmapper.ConversionError, match="momentum=None"):
        fmapper.source(net, "flax", (torch.randn(5, 3),), train=True)


@pytest.mark.nightly
def test_a_mode_is_recorded_once(monkeypatch):
    recorded = []
    export = TorchAdapter.export_program

    def note(self, *args, train, **settings):
        recorded.append(train)
        return export(self, *args, train=train, **settings)

    monkeypatch.setattr(TorchAdapter, "export_program", note)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))
    x = torch.randn(5, 3)
    source, proof, reason = translate_proved(net, "flax", (x,))
    assert proof
    assert "momentum=None" in reason
    assert recorded == [True, False]
    assert source.code == translate(net, "flax", (x,))[0].code
    assert recorded == [True, False, False]


@pytest.mark.nightly
def test_proofs_compile_in_one_folder(monkeypatch):
    folders = []
    run = proof.subprocess.run

    def note(command, *, env, **settings):
        folders.append(env["JAX_COMPILATION_CACHE_DIR"])
        return run(command, env=env, **settings)

    monkeypatch.setattr(proof.subprocess, "run", note)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for _ in range(2):
        translate(nn.Linear(3, 2), "flax", (torch.randn(5, 3),), proved=True)
    assert len(folders) == 2
    assert len(set(folders)) == 1
    assert Path(folders[0]).is_dir()


class Small(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return {"b": self.dropout(self.linear(x)), "a": x[0]}


@pytest.mark.nightly
@pytest.mark.parametrize("train", [False, True])
def test_a_structured_model_for_torch_is_compared(monkeypatch, train):
    made = build.build

    def wrong(program, source):
        model = made(program, source)
        with torch.no_grad():
            model.linear.weight.mul_(1.5)
        return model

    small, x = Small(nnx.Rngs(0)), jnp.ones((2, 4))
    net = fmapper.convert(small, "torch", (x,), structure=True, train=train)
    small.eval()
    np.testing.assert_allclose(
        net.eval()(torch.ones(2, 4))["b"].detach(), small(x)["b"], rtol=1e-5, atol=1e-6
    )
    monkeypatch.setattr(build, "build", wrong)
    with pytest.raises(fmapper.ConversionError, match="differs from the original"):
        fmapper.convert(Small(nnx.Rngs(0)), "torch", (x,), structure=True, train=train)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(12, 4))
        self.register_buffer("shift", torch.randn(12, 4), persistent=False)

    def forward(self, x):
        return x + self.table[: x.shape[0]] + self.shift[: x.shape[0]]


@pytest.mark.daily_cases("jax")
@pytest.mark.parametrize("target", ["flax", "equinox", "jax"])
def test_values_of_the_state_dict_are_not_written_out(target):
    if target == "equinox":
        pytest.importorskip("equinox")
    net = Positions()
    code = fmapper.source(net, target, (torch.ones(3, 4),))
    assert code.count("zeros((12, 4)") == 1
    state = {name: array.numpy() for name, array in net.state_dict().items()}
    module: dict = {}
    exec(code, module)

    def filled(state):
        import jax

        if target == "jax":
            trees = module["load_weights"](module["init_positions"](jax.random.key(0)), state)
            return lambda x: module["positions"](*trees, x)
        made = module["Positions"](
            **({"rngs": nnx.Rngs(0)} if target == "flax" else {"key": jax.random.key(0)})
        )
        return module["load_weights"](made, state)

    found = filled(state)(jnp.ones((3, 4)))
    np.testing.assert_allclose(found, net(torch.ones(3, 4)), rtol=1e-6)
    with pytest.raises(ValueError, match="table"):
        filled({})


def test_one_of_a_dimension_is_an_index():
    code = fmapper.source(
        lambda x: x[0] * x[:, 1], "torch", (jnp.ones((3, 3)),), dynamic_shapes=None
    )
    assert "x[0]" in code
    assert "x[:, 1]" in code


class Centred(nn.Module):
    """Keeps a running mean, in its own code."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


@pytest.mark.nightly
def test_what_a_module_writes_to_its_buffers_is_written():
    torch.manual_seed(0)
    net, x = nn.Sequential(Centred(), nn.Tanh()), torch.randn(5, 4)
    model = fmapper.convert(net, "flax", (x,), structure=True, train=True)
    for mode in ("train", "train", "eval"):
        getattr(net, mode)(), getattr(model, mode)()
        np.testing.assert_allclose(model(x.numpy()), net(x).detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model[0].mean[...], net[0].mean, rtol=1e-5, atol=1e-6)


class Noisy(nn.Module):
    """Adds noise to its weights in training, as agents do; it is a dense layer in evaluation."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight_mu = nn.Parameter(torch.randn(outputs, inputs))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), 0.1))
        self.register_buffer("weight_epsilon", torch.randn(outputs, inputs))
        self.bias_mu = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        if self.training:
            weight = self.weight_mu + self.weight_sigma * self.weight_epsilon
            return nn.functional.linear(x, weight, self.bias_mu)
        return nn.functional.linear(x, self.weight_mu, self.bias_mu)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = Noisy(3, 5)
        self.value = Noisy(5, 2)
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        values = self.value(torch.relu(self.hidden(x)))
        weight = self.weight * 2 if self.training else self.weight
        return nn.functional.linear(values, weight)


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["flax", "equinox"])
def test_what_is_a_layer_in_evaluation_alone_is_a_class_in_both_modes(to):
    _found, proof, reason = translate_proved(Agent(), to, (torch.randn(4, 3),))
    assert proof
    assert not reason


class Idle(nn.Module):
    """A part behind a layer, in evaluation."""

    def __init__(self, part):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.part = part

    def forward(self, x):
        return self.part(self.linear(x))


class OfItself(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


def made(code):
    """Returns the model of a file for Flax."""
    names = {}
    exec(code, names)
    return names["Idle"](rngs=nnx.Rngs(0))


@pytest.mark.nightly
def test_a_file_for_evaluation_evaluates_and_refuses_training():
    net = Idle(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()))
    x = torch.randn(3, 4)
    model = made(fmapper.source(net, "flax", (x,)))
    with pytest.raises(RuntimeError, match="what it leaves out is batch statistics and dropout"):
        model.train()
    arrays = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    type(model).__call__.__globals__["load_weights"](model, arrays)
    np.testing.assert_allclose(model(x.numpy()), net.eval()(x).detach(), atol=1e-6)


@pytest.mark.parametrize(
    "part",
    [nn.Dropout(0.0), nn.BatchNorm1d(4, track_running_stats=False), OfItself(4, 2)],
    ids=["dropout", "norm", "attention"],
)
def test_a_file_of_what_does_the_same_in_training_refuses_nothing(part):
    code = fmapper.source(Idle(part), "flax", (torch.randn(3, 4),))
    assert "for evaluation alone" not in code
    assert "def train(" not in code


class ByItself(nn.Module):
    """Reads its mode in its own code, in one of several ways."""

    calls = 0

    def __init__(self, way, rate=0.0):
        super().__init__()
        self.linear, self.way, self.rate = nn.Linear(4, 4), way, rate

    def forward(self, x, target=None):
        x = self.linear(x)
        return getattr(self, self.way)(x, target)

    def branch(self, x, target):
        return x * 2 if self.training else x

    def constant(self, x, target):
        return x * torch.tensor(2.0 if self.training else 1.0)

    def attention(self, x, target):
        rate = self.rate if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=rate)

    def results(self, x, target):
        return (x, x) if self.training else (x,)

    def draw(self, x, target):
        return x[:1] if self.training and random.random() < self.rate else x

    def count(self, x, target):
        if self.training:
            self.calls += 1
        return x

    def assertion(self, x, target):
        assert target is not None or not self.training, "needs a target"
        return x

    def nothing(self, x, target):
        return x * (2 - self.training * 0)


@pytest.mark.parametrize(
    ("way", "rate", "lacks"),
    [
        (
            "branch",
            0.0,
            "the code of the model that self.training selects, first at test_modes.py:",
        ),
        ("constant", 0.0, "the code of the model that self.training selects."),
        (
            "attention",
            0.1,
            "the code of the model that self.training selects, first at test_modes.py:",
        ),
        ("results", 0.0, "the code of the model that self.training selects."),
        ("draw", 0.0, "the code of the model that self.training selects."),
        ("count", 0.0, "the code of the model that self.training selects."),
        ("assertion", 0.0, "does not run on the examples in training mode (needs a target)."),
    ],
)
def test_a_file_for_evaluation_says_what_code_does_by_its_mode(way, rate, lacks):
    net, numbers = ByItself(way, rate), random.getstate()
    code = fmapper.source(net, "flax", (torch.randn(3, 4),))
    assert lacks in " ".join(code.split('"""')[1].split())
    assert "def train(self, **attributes):" in code
    assert random.getstate() == numbers
    assert net.training
    assert not net.calls


@pytest.mark.parametrize(("way", "rate"), [("attention", 0.0), ("nothing", 0.0)])
def test_code_that_reads_its_mode_in_vain_lacks_nothing(way, rate):
    code = fmapper.source(ByItself(way, rate), "flax", (torch.randn(3, 4),))
    assert "for evaluation alone" not in code


def test_a_structured_model_names_what_its_training_lacks():
    model = fmapper.convert(ByItself("branch"), "flax", (torch.randn(3, 4),), structure=True)
    with pytest.raises(
        fmapper.ConversionError, match=r"the code of the model that self\.training selects"
    ):
        model.train()


@pytest.mark.parametrize("to", ["jax", "equinox"])
def test_files_without_modes_say_what_they_lack(to):
    part = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    code = fmapper.source(Idle(part), to, (torch.randn(3, 4),))
    assert "without training: what it leaves out is batch statistics and dropout." in code
