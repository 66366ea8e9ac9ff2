"""Layers with a product of a low rank beside them, in files for torch."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")

from support.written import written  # noqa: E402

pytestmark = pytest.mark.nightly


def agree(model, x):
    """Asserts that a file gives what its model does, with other weights than at first."""
    keys = iter(range(99))
    params = nnx.state(model, nnx.Param)
    moved = jax.tree.map(
        lambda p: p + jax.random.normal(jax.random.key(next(keys)), p.shape), params
    )
    nnx.update(model, moved)
    source, net, _ = written(model, x)
    got = net(torch.from_numpy(np.array(x)))
    np.testing.assert_allclose(got.detach(), model(x), rtol=1e-4, atol=1e-4)
    assert source.layers[0] == source.layers[1]
    return source.code, net


class Adapted(nnx.Module):
    def __init__(self, bias):
        rngs = nnx.Rngs(0)
        inner = nnx.Linear(6, 6, use_bias=bias, rngs=rngs)
        self.first = nnx.LoRALinear(4, 6, lora_rank=2, use_bias=bias, rngs=rngs)
        self.second = nnx.LoRA(6, 3, 6, base_module=inner, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_with_a_low_rank_is_one_layer(bias):
    _code, net = agree(Adapted(bias), jax.random.normal(jax.random.key(0), (3, 4)))
    assert isinstance(net.first, torch.nn.Linear)
