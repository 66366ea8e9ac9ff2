"""Models of Linen as people write them, in files for torch as people write those."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nn = pytest.importorskip("flax.linen")
jnp = jax.numpy

from support.written import written  # noqa: E402


def agree(module, *args, others=()):
    """Asserts that a file gives what its model does, on other sizes, too; returns the file."""
    variables = module.init(jax.random.key(0), *args)
    noise = jax.random.key(5)
    variables = jax.tree.map(lambda x: x + jax.random.uniform(noise, x.shape) * 0.1, variables)
    source, net, _ = written((module, variables), *args)
    net.eval()
    for given in (args, *others):
        tensors = [torch.from_numpy(np.array(x)) for x in given]
        got = jax.tree.leaves(net(*tensors))
        want = jax.tree.leaves(module.apply(variables, *given))
        assert len(got) == len(want) > 0
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours.detach(), theirs, rtol=1e-4, atol=1e-5)
    return source.code, net


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.combine_masks(nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(
            x[..., 0] > -9, x[..., 0] > -9
        ))  # fmt: skip
        table = np.sin(np.arange(9 * 16, dtype="float32").reshape(1, 9, 16))
        x = x + jnp.asarray(table)[:, : x.shape[1]]
        return nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=mask)


@pytest.mark.nightly
def test_arrays_of_the_code_move_with_the_model():
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    _code, net = agree(Attention(), x)
    (name,) = dict(net.named_buffers())
    assert name not in net.state_dict()


def test_integers_are_counted_by_segments():
    torch = pytest.importorskip("torch")
    numbers = jnp.array([0, 2, 2, 1, 2])
    _, net, _ = written(lambda x: jnp.bincount(x, length=3), numbers)
    assert net(torch.from_numpy(np.array(numbers))).tolist() == [1, 1, 3]
