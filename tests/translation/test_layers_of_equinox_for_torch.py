"""Layers that files for PyTorch have in the place of Equinox's, compared with these."""

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from fmapper_translate.torch.equinox import layers  # noqa: E402
from fmapper_translate.torch.weights import load_weights  # noqa: E402

KEY = {"key": jax.random.key(0)}
KERNEL = {"stride": 2, "dilation": 2}


def compare(theirs, ours, *shapes):
    arrays = jax.tree_util.tree_leaves_with_path(eqx.filter(theirs, eqx.is_array))
    state = {jax.tree_util.keystr(path, simple=True, separator="."): np.array(x)
             for path, x in arrays}  # fmt: skip
    load_weights(ours, state)
    inputs = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    there = theirs(*inputs)
    here = ours(*[torch.from_numpy(np.array(x)) for x in inputs])
    assert here.shape == there.shape
    assert np.allclose(here.detach().numpy(), there, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "SAME", **KERNEL},
        {"padding": "SAME_LOWER", "stride": 2},
        {"padding": ((0, 1), (2, 1)), "dilation": 2, "use_bias": False},
        {"padding": 1, "padding_mode": "REFLECT", "groups": 2},
        {"padding": (1, 2), "padding_mode": "CIRCULAR"},
    ],
)
def test_convolutions(options):
    theirs = eqx.nn.Conv(2, 4, 6, 3, **options, **KEY)
    compare(theirs, layers.Conv(2, 4, 6, 3, **options), (4, 9, 8))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"padding": "SAME", **KERNEL},
        {"padding": "SAME_LOWER", "stride": 3},
        {"padding": ((0, 1), (2, 1)), "groups": 2, "use_bias": False},
    ],
)
def test_transposed_convolutions(options):
    theirs = eqx.nn.ConvTranspose(2, 4, 6, 3, **options, **KEY)
    compare(theirs, layers.ConvTranspose(2, 4, 6, 3, **options), (4, 5, 6))


def test_layers_of_vectors():
    compare(eqx.nn.GRUCell(3, 5, **KEY), layers.GRUCell(3, 5), (3,), (5,))
    compare(eqx.nn.GRUCell(3, 5, False, **KEY), layers.GRUCell(3, 5, False), (3,), (5,))
    compare(eqx.nn.RMSNorm(6), layers.RMSNorm(6), (6,))
    compare(eqx.nn.RMSNorm((2, 3), use_bias=False), layers.RMSNorm((2, 3), use_bias=False), (2, 3))
    compare(eqx.nn.PReLU(0.3), layers.PReLU(0.3), (6,))
    theirs = eqx.nn.RotaryPositionalEmbedding(6, 100.0)
    compare(theirs, layers.RotaryPositionalEmbedding(6, 100.0), (5, 6))
    theirs = eqx.nn.WeightNorm(eqx.nn.Linear(3, 4, **KEY))
    compare(theirs, layers.WeightNorm(torch.nn.Linear(3, 4)), (3,))
    theirs = eqx.nn.WeightNorm(eqx.nn.Conv2d(2, 4, 3, **KEY), axis=None)
    compare(theirs, layers.WeightNorm(layers.Conv(2, 2, 4, 3), axis=None), (2, 5, 5))


def test_an_lstm_cell():
    theirs, ours = eqx.nn.LSTMCell(3, 5, **KEY), layers.LSTMCell(3, 5)
    x, h = jnp.ones(3), jnp.ones(5)
    load_weights(ours, {name: np.array(getattr(theirs, name)) for name in
                        ("weight_ih", "weight_hh", "bias")})  # fmt: skip
    here = ours(torch.ones(3), (torch.ones(5), torch.ones(5)))
    for a, b in zip(here, theirs(x, (h, h)), strict=True):
        assert np.allclose(a.detach().numpy(), b, atol=1e-6)


def test_a_shared_array_is_one_parameter():
    made = layers.Shared(
        (torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5)),
        where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight,
    )  # fmt: skip
    embedding, linear = made()
    assert linear.weight is embedding.weight
    assert len([*made.parameters()]) == 2
