"""Models of Linen as people write them, in files for torch as people write those."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nn = pytest.importorskip("flax.linen")
jnp = jax.numpy

from fmapper.translation.source import translate  # noqa: E402
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
def test_attention_has_its_layers_and_the_usual_scale():
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    other = jax.random.normal(jax.random.key(2), (3, 8, 16))
    code, _ = agree(Attention(), x, others=[(other,)])
    assert "self.query = nn.Linear(16, 16)" in code  # DenseGeneral is a layer and a view
    assert "self.query(inputs_q).unflatten(-1, (2, 8))" in code
    assert "scale=" not in code
    assert "/ 2.828427" not in code
    assert ".to(torch.float32) != 0.0) &" not in code


@pytest.mark.nightly
def test_arrays_of_the_code_move_with_the_model():
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    code, net = agree(Attention(), x)
    (name,) = dict(net.named_buffers())
    assert "persistent=False" in code
    assert name not in net.state_dict()
    assert f"self.{name}[:, :length]" in code


class Upsample(nn.Module):
    @nn.compact
    def __call__(self, x):
        n, h, w, c = x.shape
        x = jax.image.resize(x, (n, h * 2, w * 3, c), "nearest")
        return nn.Conv(4, (3, 3))(x)


@pytest.mark.nightly
def test_enlarged_images_repeat_their_rows():
    x, other = (jax.random.normal(jax.random.key(1), (2, n, n + 1, 4)) for n in (6, 7))
    code, _ = agree(Upsample(), x, others=[(other,)])
    assert "repeat_interleave(2, 1)" in code
    assert "repeat_interleave(3, 2)" in code


class Block(nn.Module):
    filters: int
    strides: Any = (1, 1)

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.filters, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=True)(y))
        y = nn.Conv(self.filters, (3, 3), self.strides, use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=True)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.filters, (1, 1), self.strides, use_bias=False, name="proj")(x)
            x = nn.BatchNorm(use_running_average=True, name="proj_norm")(x)
        return nn.relu(x + y)


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        for filters in (4, 4, 6, 6):
            x = Block(filters)(x)
        return x.mean((1, 2))


@pytest.mark.nightly
def test_blocks_with_and_without_a_shortcut_are_one_class():
    code, _ = agree(Residual(), jax.random.normal(jax.random.key(1), (2, 8, 8, 4)))
    assert code.count("class Block") == 1
    assert "if has_proj" in code


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dropout(0.2)(nn.Dense(4)(x), deterministic=not train)


class EndsWithDropout(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return x + Perceptron()(x, train)


@pytest.mark.nightly
def test_a_part_that_ends_with_dropout_is_not_one():
    module, x = EndsWithDropout(), jax.random.normal(jax.random.key(1), (2, 4))
    model = module, module.init(jax.random.key(0), x)
    options = {"rngs": {"dropout": jax.random.key(2)}}
    code = translate(model, "torch", (x,), options, "auto", True)[0].code
    assert "self.Dropout_0 = nn.Dropout(0.2)" in code


class Pooled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (3, 4):
            x = nn.relu(nn.Conv(features, (3, 3), padding="VALID")(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return x.mean(axis=(1, 2))


@pytest.mark.nightly
def test_a_mean_over_sizes_that_convolutions_leave_is_a_mean():
    x = jax.random.normal(jax.random.key(1), (2, 17, 20, 2))
    other = jax.random.normal(jax.random.key(2), (1, 24, 19, 2))
    code, _ = agree(Pooled(), x, others=[(other,)])
    assert "return torch.mean(x, (1, 2))" in code
    assert "abs(" not in code


class Messages(nn.Module):
    @nn.compact
    def __call__(self, nodes, senders, receivers):
        sent = nn.Dense(4)(nodes)[senders]
        count = nodes.shape[0]
        degree = jax.ops.segment_sum(jnp.ones_like(receivers, "float32"), receivers, count)
        return jax.ops.segment_sum(sent, receivers, count) / (1 + degree)[:, None]


@pytest.mark.nightly
def test_rows_of_graphs_have_the_meaning_of_jax():
    nodes = jax.random.normal(jax.random.key(1), (5, 3))
    senders, receivers = jnp.array([0, -1, 4, 9, 2, -7]), jnp.array([1, 0, -1, 2, 7, 1])
    other = jax.random.normal(jax.random.key(2), (8, 3)), senders[:4], receivers[:4]
    code, _ = agree(Messages(), nodes, senders, receivers, others=[other])
    assert "take_rows(nodes, senders)" in code.replace("self.Dense_0(nodes)", "nodes")
    assert code.count(" segment_sum(") == 3
    assert "index_add" not in code.partition("class Messages")[2]


def test_integers_are_counted_by_segments():
    torch = pytest.importorskip("torch")
    numbers = jnp.array([0, 2, 2, 1, 2])
    source, net, _ = written(lambda x: jnp.bincount(x, length=3), numbers)
    assert "segment_sum(" in source.code
    assert net(torch.from_numpy(np.array(numbers))).tolist() == [1, 1, 3]
