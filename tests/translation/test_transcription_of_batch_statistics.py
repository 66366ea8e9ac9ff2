"""Statistics of batches in files for Equinox: calls in training collect the new ones."""

import dataclasses
import sys

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
pytest.importorskip("flax")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fmapper  # noqa: E402
from fmapper_translate import transcribe  # noqa: E402


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Reaches norms through a sequence, a loop, a method, and one of them twice."""

    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 1, bias=False), nn.BatchNorm2d(width, momentum=None)
        )
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.shared = nn.BatchNorm2d(width, momentum=0.3, affine=False)
        self.parts = nn.ModuleList(
            [nn.Linear(width, 3, bias=False), nn.BatchNorm1d(3), nn.Dropout(0.0)]
        )

    def head(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head((self.shared(x) * self.shared(2 * x)).mean((2, 3)))


def images(seed, count=16):
    return torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def opened(found, model):
    """The names of a file, and its model with the weights of the source."""
    space = {}
    exec(found.whole, space)
    weights = {name: model.state_dict()[name].numpy().copy() for name in found.weights}
    return space, space["load_weights"](space["make_model"](key=jax.random.key(0)), weights)


@pytest.fixture(scope="module")
def transcribed():
    torch.manual_seed(0)
    model = Net()
    return model, transcribe(model.eval(), (images(0),), target="equinox")


def test_calls_are_given_what_collects_statistics(transcribed):
    _, found = transcribed
    assert not found.only_evaluation
    for line in (
        "        return x + jax.nn.relu(self.norm(self.conv(x), statistics=statistics))\n",
        "        x = self.stem(x, statistics=statistics)\n",
        "            x = block(x, statistics=statistics)\n",
        "            x = call_part(part, x, key=keys(), statistics=statistics)\n",
    ):
        assert line in found.code, line


def test_statistics_and_gradients_are_those_of_the_source(transcribed):
    model, found = transcribed
    space, twin = opened(found, model)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def loss(model, x):
        statistics = space["Statistics"](model)
        y = model(x, statistics=statistics)
        return (y**3).sum(), (statistics.update(), y)

    model.train()
    for seed in range(3):
        model.zero_grad()
        wanted = model(images(seed))
        (wanted**3).sum().backward()
        (_, (twin, y)), slopes = loss(twin, images(seed).numpy())
        np.testing.assert_allclose(y, wanted.detach(), rtol=1e-4, atol=1e-5)
        slopes = space["source_state"](slopes)
        for name, array in model.named_parameters():
            np.testing.assert_allclose(slopes[name], array.grad, rtol=1e-3, atol=1e-4)
    ours, theirs = space["source_state"](twin), model.state_dict()
    lacking = theirs.keys() - ours.keys()
    assert "stem.1.num_batches_tracked" in ours
    assert all(name.endswith("num_batches_tracked") for name in lacking)
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-5, atol=1e-6)
    other, model = images(3), model.eval()
    found = eqx.nn.inference_mode(twin)(other.numpy())
    np.testing.assert_allclose(found, model(other).detach(), rtol=1e-4, atol=1e-5)


def test_training_without_a_collector_is_an_error(transcribed):
    model, found = transcribed
    space, twin = opened(found, model)
    x = images(0).numpy()
    with pytest.raises(ValueError, match=r"pass statistics=Statistics\(model\)"):
        twin(x)
    statistics = space["Statistics"](twin)
    with pytest.raises(ValueError, match="not one of the model that the statistics were made of"):
        eqx.filter_checkpoint(twin)(x, statistics=statistics)


class Small(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.linear(x))


def test_a_structured_model_trains_and_gives_its_statistics_back():
    torch.manual_seed(0)
    net, x = Small(4).train(), torch.randn(6, 3)
    made = fmapper.convert(net, "equinox", (x,), structure=True, train=True)
    report = fmapper.verify(net, made, x, gradients=True)
    assert report, report
    statistics = sys.modules[type(made).__module__].Statistics(made)
    made(x.numpy(), statistics=statistics)
    learned = fmapper.state(statistics.update(), source=True)
    net(x)
    for name, array in net.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(learned[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_a_proof_compares_statistics():
    torch.manual_seed(0)
    model, x = Small(4).eval(), torch.randn(6, 3)
    found = transcribe(model, (x,), target="equinox")
    proof = found.prove(model, (x,))
    assert proof, proof
    code = found.code.replace("var * count / (count - 1)", "var")
    assert code != found.code
    proof = dataclasses.replace(found, code=code).prove(model, (x,))
    assert proof.holds("eval")
    assert not proof.holds("train")


class Named(nn.Module):
    """Has a variable of its own of the name of what is passed on."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        statistics = x.mean(0)
        return self.norm(x) + statistics


def test_a_variable_of_that_name_is_for_evaluation_alone():
    found = transcribe(Named().eval(), (torch.ones(2, 3),), target="equinox")
    assert "Named.forward has a variable `statistics` of its own" in found.only_evaluation
