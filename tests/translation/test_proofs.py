"""Proofs of files at bends: what a few roundings of the weights change is proved elsewhere."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402

from fmapper.backends.discovery import get_adapter  # noqa: E402
from fmapper.backends.models import Models  # noqa: E402
from fmapper.translation.proof import prove  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402
from fmapper.verification.files.conditions import AWAY  # noqa: E402
from fmapper.verification.files.written_test import write_test  # noqa: E402
from fmapper.verification.models.spreads import Spread, with_effect  # noqa: E402
from fmapper_adapters.torch.trials.trial import TorchTrial  # noqa: E402


class Bent(nn.Module):
    """What its ReLU is given for the first example lies some roundings above zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 2)
        self.x = torch.randn(2, 6)
        with torch.no_grad():
            product = self.x[0].double() @ self.first.weight.double().T
            self.first.bias.copy_(2e-7 - product)

    def forward(self, x):
        return self.last(self.first(x).relu())


def proof_of(model, change=None):
    given = (model.x,)
    source, program, _ = translate(model, "flax", given)
    if change is not None:
        assert change[0] in source.code
        source = replace(source, code=source.code.replace(*change))
    origin, target = get_adapter("torch", Models), get_adapter("flax", Models)
    return prove(source, program, model, origin, target, given, {})


@pytest.mark.nightly
def test_a_file_that_rounds_across_a_bend_is_proved_beside_it():
    near = ("jax.nn.relu(self.first(x))", "jax.nn.relu(self.first(x) - 1e-6)")
    proof = proof_of(Bent().eval(), near)
    assert proof, proof
    assert proof.away == AWAY
    assert not proof_of(Bent().eval()).away


@pytest.mark.nightly
def test_a_file_with_wrong_gradients_is_refused_at_a_bend_too():
    wrong = (
        "jax.nn.relu(self.first(x))",
        "(lambda y: 0.9 * y + 0.1 * jax.lax.stop_gradient(y))(jax.nn.relu(self.first(x)))",
    )
    proof = proof_of(Bent().eval(), wrong)
    assert not proof
    assert proof.errors["eval outputs"] < 1e-5
    assert proof.errors["eval gradients"] > 1e-2


@pytest.mark.nightly
def test_a_file_that_is_off_by_more_than_roundings_are_is_refused_where_it_was_compared():
    far = ("jax.nn.relu(self.first(x))", "jax.nn.relu(self.first(x) - 2e-2)")
    proof = proof_of(Bent().eval(), far)
    assert not proof
    assert not proof.away


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_model_is_proved_as_its_original():
    model = torch.compile(Bent()).eval()
    *_, proof = translate(model, "flax", (model.x,), proved=True)
    assert proof
    assert {"eval gradients", "eval steps"} <= {*proof.errors}
    assert proof.name == "Bent"


class Borrowed(nn.Module):
    """Calls a layer of its own through an object that copies share."""

    class Call:
        def __init__(self, layer):
            self.layers = [layer]

        def __deepcopy__(self, _):
            return self

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(6, 2)
        self.call = self.Call(self.own)

    def forward(self, x):
        return self.call.layers[0](x)


@pytest.mark.nightly
def test_gradients_that_a_copy_does_not_have_are_named():
    *_, proof = translate(Borrowed().eval(), "flax", (torch.randn(3, 6),), proved=True)
    assert proof.refused == {"eval": "its outputs depend on parameters that are not its own"}
    assert "gradients not compared" in str(proof)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, training):
        ctx.training = training
        return 2 * x

    @staticmethod
    def backward(ctx, slope):
        assert ctx.training, "call train() first"
        return 2 * slope, None


class Asserts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return Reversed.apply(self.layer(x), self.training)


def test_gradients_that_a_model_refuses_in_evaluation_are_named():
    model, x = Asserts(), torch.ones(3, 6)
    slopes = [TorchTrial(model, (x,), {}, train=train).slope({}) for train in (False, True)]
    assert [slope.refused for slope in slopes] == ["call train() first", ""]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
        return y.float()


@pytest.mark.nightly
def test_a_model_that_computes_in_half_precision_is_refused_for_that():
    *_, proof = translate(Mixed().eval(), "flax", (torch.randn(9, 6),), proved=True)
    assert not proof
    assert "the model computes in bfloat16" in str(proof)


class Deep(nn.Module):
    """Trains on batches of three, through which its norms multiply a rounding by thousands."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(5))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.sin(3 * norm(layer(x)))
        return x


@pytest.mark.nightly
def test_a_model_that_multiplies_roundings_is_proved_in_double_precision(tmp_path):
    torch.manual_seed(0)
    model, given = Deep(), (torch.randn(3, 6),)
    source, program, _ = translate(model, "flax", given, train=True)
    adapters = get_adapter("torch", Models), get_adapter("flax", Models)
    proof = prove(source, program, model, *adapters, given, {})
    assert proof, proof
    assert proof.double
    assert "in double precision, since a rounding of its own changes" in str(proof)
    assert proof.errors["train gradients"] < 1e-6
    file = tmp_path / "deep.py"
    file.write_text(source.code)
    test = write_test(file, proof)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test], check=True
    )
    wrong = replace(source, code=source.code.replace("jnp.sin(", "1.001 * jnp.sin("))
    assert wrong.code != source.code
    assert not prove(wrong, program, model, *adapters, given, {})


class Steep(nn.Module):
    """Leaves the numbers within five steps, unless these are a ten-thousandth of the gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.nightly
def test_steps_are_as_small_as_a_model_needs_them():
    torch.manual_seed(0)
    model, given = Steep(), (torch.randn(3, 8),)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(6)
    *_, proof = translate(model, "flax", given, train=True, proved=True)
    assert proof, proof
    assert float(proof.data["train.rate"]) < 1e-3
    assert {"train steps", "eval steps"} <= {*proof.errors}


@pytest.mark.nightly
def test_a_deep_model_of_jax_is_proved_in_double_precision():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(5)])
            self.norms = nnx.List([nnx.BatchNorm(6, rngs=rngs) for _ in range(5)])

        def __call__(self, x):
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = jnp.sin(3 * norm(layer(x)))
            return x

    x = jax.random.normal(jax.random.key(0), (3, 6))
    _, _, proof = translate(Net(nnx.Rngs(0)), "torch", (x,), train=True, proved=True)
    assert proof, proof
    assert proof.double
    assert proof.errors["train gradients"] < 1e-6


class Rooted(nn.Module):
    """Has no gradient where its scale is zero, as it is, and no numbers after the first step."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.layer(x) * (self.scale * self.scale).sqrt()


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_models_that_leave_the_numbers_do_so_in_both(target):
    given = (torch.randn(3, 6),)
    *_, proof = translate(Rooted(), target, given, train=True, proved=True)
    assert proof, proof
    assert torch.from_numpy(proof.data["train.after.layer.weight"]).isnan().all()


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop, self.drop_more = nn.Dropout(0.1), nn.Dropout(0.5)

    def forward(self, x):
        h = self.first(x).relu()
        h = h + self.drop(self.inner(h))
        return self.last(self.drop_more(h))


@pytest.fixture(scope="module")
def dropping():
    model, given = Dropping(), (torch.randn(4, 6),)
    source, program, _ = translate(model, "flax", given, train=True)

    def prove_with(*change):
        assert not change or change[0] in source.code
        changed = replace(source, code=source.code.replace(*change)) if change else source
        origin, target = get_adapter("torch", Models), get_adapter("flax", Models)
        return prove(changed, program, model, origin, target, given, {})

    return prove_with


@pytest.mark.nightly
def test_rates_and_places_of_dropout_are_proved_over_seeds(dropping):
    proof = dropping()
    assert proof, proof
    assert proof.errors["train dropout"] < 4
    assert "without dropout; with it, means and spreads over 256 seeds are those" in str(proof)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "change",
    [
        ("nnx.Dropout(0.1", "nnx.Dropout(0.12"),
        ("nnx.Dropout(0.5", "nnx.Dropout(0.1"),
        ("h + self.drop(self.inner(h))", "self.drop(h + self.inner(h))"),
        ("self.drop_more(h)", "h"),
        ("self.drop_more(h)", "self.drop(self.drop_more(h))"),
        ("self.drop(self.inner(h))", "self.drop_more(self.inner(h))"),
        ("self.drop(self.inner(h))", "self.inner(self.drop(h))"),
    ],
)
def test_files_with_other_dropout_are_refused(dropping, change):
    proof = dropping(*change)
    assert not proof
    assert "differ" in str(proof)
    assert proof.errors["train outputs"] < 1e-5


class Narrow(nn.Module):
    """Drops little between linear layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 6), nn.Linear(6, 5)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.last(self.drop(self.first(x)))


@pytest.mark.nightly
def test_dropout_of_a_low_rate_between_linear_layers_is_in_its_place():
    model, given = Narrow(), (torch.randn(1, 16),)
    source, program, proof = translate(model, "flax", given, train=True, proved=True)
    assert proof, proof
    change = "self.drop(self.first(x))", "self.first(self.drop(x))"
    assert change[0] in source.code
    changed = replace(source, code=source.code.replace(*change))
    origin, target = get_adapter("torch", Models), get_adapter("flax", Models)
    proof = prove(changed, program, model, origin, target, given, {})
    assert not proof
    assert proof.errors["train dropout"] > 8


def test_spreads_are_compared_in_standard_errors():
    still = [np.ones((2, 3), np.float32), np.arange(3)]

    def spread(seed, rate, count=256):
        generator, found = np.random.default_rng(seed), Spread(still)
        for _ in range(count):
            kept = generator.random((2, 3)) > rate
            found.add([still[0] * kept / (1 - rate), still[1]])
        return found

    known = spread(0, 0.1).result()
    assert spread(1, 0.1).distance(known) < 4
    assert spread(2, 0.2).distance(known) > 6
    exact = Spread(still)
    exact.add(still)
    assert spread(3, 0.1).distance(exact.result()) > 6
    assert exact.distance(exact.result()) == 0


def test_dropout_before_a_linear_layer_is_not_dropout_after_it():
    numbers = np.random.default_rng(0)
    x, kernel = numbers.normal(size=(4, 8)), numbers.normal(size=(8, 6))

    def spread(seed, *, before):
        generator, found = np.random.default_rng(seed), Spread([x @ kernel])
        for _ in range(256):
            kept = (generator.random((4, 8 if before else 6)) > 0.1) / 0.9
            found.add([(x * kept) @ kernel if before else (x @ kernel) * kept])
        return found

    for before in (False, True):
        known = spread(0, before=before).result()
        assert spread(1, before=before).distance(known) < 4
        assert spread(2, before=not before).distance(known) > 20


class DroppingInNNX(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.first(x))))


@pytest.mark.nightly
def test_keys_of_the_source_are_ignored_and_its_dropout_is_proved():
    given = (jnp.ones((4, 6)) * jnp.arange(6.0),)
    model = DroppingInNNX(nnx.Rngs(0))
    source, _, proof = translate(model, "torch", given, train=True, proved=True)
    assert proof, proof
    assert 0 < proof.errors["train dropout"] < 4
    assert "IGNORED = (" in source.code


def test_dropout_that_a_call_leaves_out_is_none():
    same, other = [np.ones(3), np.array([np.nan])], [np.zeros(3), np.array([np.nan])]
    drawn = {math.nan: [same, same], 0.1: [same, same], 0.2: [same, other]}
    assert [*map(str, with_effect(drawn))] == ["nan", "0.2"]


class WritesInput(nn.Module):
    def forward(self, x):
        x.mul_(2)
        return nn.functional.dropout(x, 0.5, self.training)


def test_each_seed_has_its_own_copy_of_what_a_module_writes_into():
    x = torch.arange(1.0, 9.0)
    model = WritesInput().train()
    trial = TorchTrial(model, (x,), {}, train=None)
    (first,), (second,) = trial.noise(trial.weights, [3, 3])
    np.testing.assert_array_equal(first, second)
    assert x[0] == 1
