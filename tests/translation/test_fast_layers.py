"""Layers of Flax in translated models have cheaper gradients, and are what they were."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper_adapters.flax.translation.fast_layers import accelerate  # noqa: E402


def layers(**options):
    """Returns a layer of each class, not yet replaced."""
    common = {"rngs": nnx.Rngs(0), **options}
    norm = {"epsilon": 1e-5, "use_fast_variance": False, **common}
    return {
        "Linear": nnx.Linear(16, 8, **common),
        "LayerNorm": nnx.LayerNorm(16, **norm),
        "one without bias": nnx.LayerNorm(16, use_bias=False, **norm),
        "one without scale": nnx.LayerNorm(16, use_scale=False, **norm),
        "RMSNorm": nnx.RMSNorm(16, **norm),
    }


def results(layer, x):
    """Returns what a layer gives, and the gradients of its input and of its arrays."""
    graph, state = nnx.split(layer)

    def loss(state, x):
        y = nnx.merge(graph, state)(x)
        return jnp.sin(y.astype(jnp.float32)).sum(), y

    slopes, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(state, x)
    return [y, *jax.tree.leaves(slopes)]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", layers())
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16 float32", "float32 bfloat16"])
def test_numbers_and_dtypes_are_those_of_flax(kind, dtypes):
    given, held = dtypes.split()[0], dtypes.split()[-1]
    layer = layers(param_dtype=held)[kind]
    x = (3 * jax.random.normal(jax.random.key(0), (2, 3, 16)) + 1).astype(given)
    before = results(layer, x)
    accelerate(nnx.List([layer]))
    atol, rtol = (1e-5, 1e-5) if dtypes == "float32" else (0.1, 1e-2)
    for old, new in zip(before, results(layer, x), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        np.testing.assert_allclose(np.float32(old), np.float32(new), atol=atol, rtol=rtol)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_second_derivatives_are_those_of_flax(kind):
    layer, x = layers()[kind], jax.random.normal(jax.random.key(0), (16,))
    before = jax.hessian(lambda x: (layer(x) ** 3).sum())(x)
    accelerate(nnx.List([layer]))
    after = jax.hessian(lambda x: (layer(x) ** 3).sum())(x)
    np.testing.assert_allclose(before, after, atol=1e-4)


CONVOLUTIONS = {
    "pixels": ((2, 7, 6, 5), (1, 1), {"padding": 0}),
    "pixels, apart": ((2, 7, 6, 5), (1, 1), {"padding": 0, "strides": 2, "use_bias": False}),
    "few places": ((2, 3, 4, 5), (3, 3), {"padding": 1}),
    "few places, apart": ((1, 6, 7, 5), (3, 2), {"padding": ((1, 0), (2, 1)), "strides": (2, 3)}),
    "a line": ((2, 9, 5), (4,), {"padding": 0, "strides": 2}),
    "a volume": ((1, 3, 4, 3, 5), (2, 3, 2), {"padding": 0}),
    "many places": ((2, 16, 16, 5), (3, 3), {"padding": 1}),
    "groups": ((2, 3, 4, 6), (3, 3), {"padding": 1, "feature_group_count": 3}),
    "by name": ((2, 3, 4, 5), (3, 3), {"padding": "SAME"}),
    "holes": ((2, 5, 5, 5), (3, 3), {"padding": 1, "kernel_dilation": 2}),
    "no batch": ((3, 4, 5), (3, 3), {"padding": 1}),
    "no places": ((1, 2, 4, 5), (3, 3), {"padding": 0}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_those_of_flax(name):
    shape, kernel, options = CONVOLUTIONS[name]
    layer = nnx.Conv(shape[-1], 24, kernel, **options, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), shape)
    before = results(layer, x)
    accelerate(nnx.List([layer]))
    for old, new in zip(before, results(layer, x), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        np.testing.assert_allclose(old, new, atol=1e-4, rtol=1e-5)
    is_product = name.startswith(("pixels", "few", "a "))
    assert is_product == ("conv_general_dilated" not in str(jax.make_jaxpr(layer)(x)))


@pytest.mark.nightly
def test_convolutions_of_converted_models_are_products():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 5, 6)
    model = fmapper.convert(net, "flax", (x,), structure=True)
    code = str(jax.make_jaxpr(model)(jnp.asarray(x.numpy())))
    assert "conv_general_dilated" not in code
    np.testing.assert_allclose(model(x.numpy()), net(x).detach().numpy(), atol=1e-6)


@pytest.mark.nightly
def test_masks_and_options_that_files_have_not_are_those_of_flax():
    x = jax.random.normal(jax.random.key(0), (2, 3, 16))
    mask = jnp.arange(16) < 9
    for kind in ("LayerNorm", "RMSNorm"):
        layer = layers()[kind]
        before = layer(x, mask=mask)
        accelerate(nnx.List([layer]))
        np.testing.assert_array_equal(before, layer(x, mask=mask))
        layer.reduction_axes = (-2, -1)
        np.testing.assert_allclose((layer(x) ** 2).mean(axis=(1, 2)), 1, rtol=1e-4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.dense = nn.Linear(16, 8)

    def forward(self, x):
        return self.dense(self.norm(x))


@pytest.fixture(scope="module")
def model():
    return fmapper.convert(Block(), "flax", (torch.randn(2, 3, 16),), structure=True)


@pytest.mark.nightly
def test_layers_are_of_the_classes_of_flax_and_printed_as_such(model):
    assert isinstance(model.dense, nnx.Linear)
    assert isinstance(model.norm, nnx.LayerNorm)
    assert type(model.norm).__name__ == "LayerNorm"
    code = fmapper.source(model)
    assert "class LayerNorm(nnx.LayerNorm):" in code
    assert "class Linear(nnx.Linear):" in code
    adapter = nnx.LoRA(16, 2, 8, base_module=model.dense, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 3, 16))
    np.testing.assert_allclose(adapter(x), model.dense(x), atol=1e-6)


@pytest.mark.nightly
def test_gradients_of_kernels_are_not_transposed(model):
    graph, state = nnx.split(model)
    x = jnp.ones((2, 3, 16))
    slope = jax.grad(lambda state: (nnx.merge(graph, state)(x) ** 2).sum())
    code = jax.jit(slope).lower(state).compile().as_text()
    assert "transpose(%" not in code


@pytest.mark.nightly
def test_the_mean_is_subtracted_once(model):
    graph, state = nnx.split(model.norm)
    program = jax.make_jaxpr(nnx.merge(graph, state))(jnp.ones((2, 3, 16)))
    assert str(program).count(" sub ") == 1


@pytest.mark.nightly_cases("True")
@pytest.mark.parametrize("structure", [False, True])
def test_gelu_is_computed_by_erf_and_as_exact_as_that_of_torch(structure):
    x = torch.linspace(-12, 12, 4001)
    model = fmapper.convert(nn.Sequential(nn.GELU()), "flax", (x,), structure=structure)
    wanted = nn.functional.gelu(x.double()).numpy()
    assert abs(np.asarray(model(x.numpy())) - wanted).max() < 2e-6
    assert "erfc" not in str(jax.make_jaxpr(model)(jnp.asarray(x.numpy())))


@pytest.mark.nightly
def test_gelu_of_halves_is_computed_in_float32():
    x = torch.linspace(-4, 4, 401, dtype=torch.bfloat16)
    model = fmapper.convert(nn.Sequential(nn.GELU()), "flax", (x,), structure=True)
    found = np.asarray(model(fmapper.to_jax(x)).astype(jnp.float32))
    np.testing.assert_allclose(found, nn.GELU()(x).float().numpy(), rtol=2e-2, atol=1e-3)
