"""A sample of the models that `nox -s flaxzoo` converts: one for each of their means."""

import pytest

import fmapper
from fmapper.verification.arrays import to_host
from fmapper.verification.differences import CONVERTED, Pair, difference
from fmapper.verification.location import _occurrences
from fmapper.verification.models.side import make_sides
from sweeps import flaxzoo as zoo

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("optax")

SAMPLE = [
    "linen/resnet_train",
    "linen/language_model_dropout",
    "linen/encoder_decoder_cached",
    "linen/lifted_control_flow",
    "linen/scanned_layers",
    "linen/vq_vae",
    "linen/graph_network",
    "linen/bidirectional_lstm",
    "nnx/regressor_train",
    "nnx/custom_state",
    "nnx/mamba",
    "nnx/ensemble",
    "equinox/cnn",
    "equinox/shared_embedding",
    "equinox/dropout_batched_keys",
    "equinox/batch_norm_state",
    "equinox/linear_recurrent_unit",
    "jax/lstm_scan",
    "jax/beam_search",
    "jax/dropout_and_sampling",
    "jax/product_quantiser_straight_through",
    "jax/gaussian_process",
    "jax/neural_ode_adaptive",
    "jax/indexing",
]


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_of_jax_is_the_same_in_torch(name):
    found = zoo.case(name)
    assert found["class"] == "ok", found.get("reason")


WATCHED = [
    "linen/unet",
    "linen/conv1d_causal_wavenet",
    "nnx/cnn_train",
    "equinox/cnn",
    "jax/dropout_and_sampling",
]


@pytest.mark.nightly
@pytest.mark.parametrize("name", WATCHED)
def test_every_operation_that_can_be_seen_is_the_same(name):
    """`verify` compares them one by one to name the first that differs."""
    model, args, kwargs = zoo.models()[name]()
    sides = make_sides(model, fmapper.convert(model, "torch", args, kwargs), args, kwargs, None)
    pairs = (sides, reversed(sides))
    ours, theirs = (dict(_occurrences(a.watch(b.adapter))) for a, b in pairs)
    ours = {key: seen for key, seen in ours.items() if key[1] not in ("weight", "input")}
    assert ours.keys() == theirs.keys()
    count = 0
    for key, seen in ours.items():
        for x, y in zip(seen.values, theirs[key].values, strict=False):
            found = difference(Pair(f"{key} ({seen.source})", to_host(x), to_host(y)), CONVERTED)
            assert found.ok, str(found)
            count += 1
    assert 4 * count >= len(ours)


def test_the_comparison_can_fail():
    """A program that forgets its parameters, or other outputs, do not pass for right."""
    frozen = torch.nn.Linear(2, 2)
    wanted = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "scale": torch.ones(1)}
    assert "missing ['scale']" in zoo.parameters_problem(wanted, frozen)
    ones = pytest.importorskip("numpy").ones(3, "float32")
    assert zoo.difference(torch.tensor([1.0, 1.0, 1.1]), ones) > zoo.TOLERANCE
    assert zoo.difference(torch.tensor([1.0, 1.0, float("nan")]), ones) == float("inf")
    assert zoo.difference(torch.ones(3, dtype=torch.float64), ones) == float("inf")


@pytest.mark.nightly
def test_outputs_of_foreign_classes_are_compiled():
    """The named tuples that stand for them are there before the compiler asks for them."""
    jnp = pytest.importorskip("jax.numpy")
    x = 2 * jnp.eye(3)
    model = fmapper.convert(jnp.linalg.slogdet, "torch", (x,))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = compiled(2 * torch.eye(3))
    assert type(found).__name__ == "SlogdetResult"
    torch.testing.assert_close(found.logabsdet, torch.tensor(8.0).log())


def test_there_are_enough_models():
    assert len(zoo.models()) >= 130
    assert set(SAMPLE) <= set(zoo.models())
