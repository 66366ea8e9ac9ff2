"""Convolutions in files for Equinox beside those of PyTorch."""

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

from fmapper_translate.equinox import layers  # noqa: E402

SIZES = (5, 6, 4)


def compare(name, **options):
    source = getattr(nn, name)(4, 6, 3, groups=2, **options)
    made = getattr(layers, name)(4, 6, 3, groups=2, **options, key=jax.random.key(0))
    arrays = [jnp.asarray(x.detach().numpy()) for x in (source.weight, source.bias)]
    made = eqx.tree_at(lambda layer: (layer.weight, layer.bias), made, arrays)
    x = torch.randn(2, 4, *SIZES[: int(name[-2])])
    np.testing.assert_allclose(made(x.numpy()), source(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("name", ["Conv1d", "Conv2d"])
def test_edges_are_those_of_the_source(name, mode):
    compare(name, stride=2, padding=2, dilation=2, padding_mode=mode)


@pytest.mark.parametrize("name", ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"])
def test_transposed_convolutions_have_every_rank(name):
    compare(name, stride=3, padding=1, output_padding=1, dilation=2)
