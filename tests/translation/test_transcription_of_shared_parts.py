"""Modules at several places, in files for Equinox, whose trees have each array once."""

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
pytest.importorskip("flax")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper_translate import transcribe  # noqa: E402


class Block(nn.Module):
    def __init__(self, gate, width):
        super().__init__()
        self.gate = gate
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.gate(self.linear(x))


class Net(nn.Module):
    """Gives a norm to a sequence, and a gate to each block of a list."""

    def __init__(self, width=4, depth=2):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.stem = nn.Sequential(nn.Linear(3, width), self.norm, nn.ReLU())
        gate = nn.Sequential(nn.Linear(width, width), nn.Sigmoid())
        self.blocks = nn.ModuleList([Block(gate, width) for _ in range(depth)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x * block(x)
        return self.norm(x)


def batch(seed):
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def transcribed():
    torch.manual_seed(0)
    model = Net()
    return model, transcribe(model.eval(), (batch(0),), target="equinox")


def test_shared_modules_are_trained_as_one(transcribed):
    model, found = transcribed
    assert not found.only_evaluation
    space = {}
    exec(found.whole, space)
    weights = {name: model.state_dict()[name].numpy().copy() for name in found.weights}
    twin = space["load_weights"](space["make_model"](key=jax.random.key(0)), weights)
    assert twin.stem[1] is None
    assert twin.blocks[1].gate is None
    assert twin.blocks[0].gate is not None

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def loss(model, x):
        statistics = space["Statistics"](model)
        return (model(x, statistics=statistics) ** 3).sum(), statistics.update()

    model.train()
    for seed in range(2):
        model.zero_grad()
        (model(batch(seed)) ** 3).sum().backward()
        (_, twin), slopes = loss(twin, batch(seed).numpy())
        slopes = space["source_state"](slopes)
        for name, array in model.named_parameters():
            np.testing.assert_allclose(slopes[name], array.grad, rtol=1e-3, atol=1e-3)
    theirs = model.state_dict()
    ours = space["source_state"](twin)
    assert ours.keys() == {name for name in theirs if "num_batches" not in name}
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-5, atol=1e-6)
    given = eqx.nn.inference_mode(twin)(batch(3).numpy())
    np.testing.assert_allclose(given, model.eval()(batch(3)).detach(), rtol=1e-4, atol=1e-5)


def test_a_deeper_model_has_its_modules_once(transcribed):
    _, found = transcribed
    space = {}
    exec(found.whole, space)
    deep = space["Net"](width=6, depth=4, key=jax.random.key(0))
    assert [block.gate is None for block in deep.blocks] == [False, True, True, True]
    assert eqx.nn.inference_mode(deep)(batch(0).numpy()).shape == (16, 6)


@pytest.mark.nightly
def test_a_file_with_shared_modules_is_proved(transcribed):
    model, found = transcribed
    proof = found.prove(model.eval(), (batch(0),))
    assert proof, proof


def test_a_structured_model_has_shared_modules():
    torch.manual_seed(0)
    model = Net().train()
    made = fmapper.convert(model, "equinox", (batch(0),), structure=True, train=True)
    report = fmapper.verify(model, made, batch(0), gradients=True)
    assert report, report
    learned = fmapper.state(made, source=True)
    for name, array in model.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_array_equal(learned[name], array)
