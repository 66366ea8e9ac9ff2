"""Weights that are computed at each call, in files for Equinox."""

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
pytest.importorskip("flax")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, spectral_norm, weight_norm  # noqa: E402

import fmapper  # noqa: E402
from fmapper_translate import transcribe  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")


class Lengths(nn.Module):
    """Has weights of a length and a direction, under the names of both functions."""

    def __init__(self):
        super().__init__()
        self.first = weight_norm(nn.Conv1d(3, 4, 3))
        self.second = parametrizations.weight_norm(nn.ConvTranspose1d(4, 2, 3, stride=2), dim=1)
        self.third = weight_norm(nn.Linear(13, 2), dim=None)

    def forward(self, x):
        return self.third(self.second(torch.relu(self.first(x))))


class Singular(nn.Module):
    """Has matrices that are divided by their largest singular value, one of them twice."""

    def __init__(self):
        super().__init__()
        self.conv = spectral_norm(nn.ConvTranspose2d(3, 4, 3, padding=1), n_power_iterations=2)
        self.linear = spectral_norm(nn.Linear(5, 5))

    def forward(self, x):
        return self.linear(torch.relu(self.linear(self.conv(x))))


CASES = {"lengths": (Lengths, (2, 3, 8)), "singular": (Singular, (2, 3, 6, 5))}


def opened(found, model):
    space = {}
    exec(found.whole, space)
    weights = {name: model.state_dict()[name].numpy().copy() for name in found.weights}
    return space, space["load_weights"](space["make_model"](key=jax.random.key(0)), weights)


@pytest.mark.parametrize("name", CASES)
def test_computed_weights_are_those_of_the_source(name):
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    with torch.no_grad():
        for array in model.parameters():
            array.mul_(1.5)
    found = transcribe(model, (x,), target="equinox")
    assert not found.only_evaluation
    space, twin = opened(found, model)
    assert space["source_state"](twin).keys() == model.state_dict().keys()
    given = eqx.nn.inference_mode(twin)(x.numpy())
    np.testing.assert_allclose(given, model(x).detach(), rtol=1e-4, atol=1e-5)
    other = space["make_model"](key=jax.random.key(1))
    assert jax.tree.structure(other) == jax.tree.structure(twin)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def loss(model, x):
        if name == "lengths":
            return (model(x) ** 2).sum(), model
        statistics = space["Statistics"](model)
        return (model(x, statistics=statistics) ** 2).sum(), statistics.update()

    (_, twin), slopes = loss(twin, x.numpy())
    (model.train()(x) ** 2).sum().backward()
    slopes, after = space["source_state"](slopes), space["source_state"](twin)
    for path, array in model.named_parameters():
        np.testing.assert_allclose(slopes[path], array.grad, rtol=1e-3, atol=1e-4)
    for path, array in model.state_dict().items():
        np.testing.assert_allclose(after[path], array, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_file_with_computed_weights_is_proved(name):
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    proof = transcribe(model, (x,), target="equinox").prove(model, (x,))
    assert proof, proof


def test_a_structured_model_has_computed_weights():
    torch.manual_seed(0)
    model, x = Singular().train(), torch.randn(2, 3, 6, 5)
    made = fmapper.convert(model, "equinox", (x,), structure=True, train=True)
    report = fmapper.verify(model, made, x, gradients=True)
    assert report, report
    assert fmapper.state(made, source=True).keys() >= model.state_dict().keys()


class Noisy(nn.Module):
    """Draws in evaluation, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x + torch.randn_like(x))


def test_a_model_that_draws_in_evaluation_takes_a_key():
    model, x = Noisy().eval(), torch.ones(2, 3)
    found = transcribe(model, (x,), target="equinox")
    assert "jax.random.normal(keys()" in found.code
    _, twin = opened(found, model)
    still = eqx.nn.inference_mode(twin)
    first, second = (still(x.numpy(), key=jax.random.key(seed)) for seed in range(2))
    assert not np.allclose(first, second)
