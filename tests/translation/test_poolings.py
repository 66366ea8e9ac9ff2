"""Poolings of models of Equinox, which have their channels first, are those of torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fmapper.translation import run_file
from fmapper.translation.source import translate

eqx = pytest.importorskip("equinox")


def same(model, x):
    """Returns the methods of the file, after it was compared with the model."""
    source, _, _ = translate(model, "torch", (x,))
    built = run_file(source)[source.name]()
    found = built(torch.tensor(np.asarray(x)))
    np.testing.assert_allclose(found.detach(), model(x), rtol=1e-5, atol=1e-6)
    return source.code[source.code.index("(nn.Module)") :].partition("def load_weights")[0]


@pytest.mark.nightly
def test_what_pools_other_dimensions_still_moves_them():
    x = jax.random.normal(jax.random.key(0), (2, 6, 8, 3))

    def over_rows(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def turned(x):
        return over_rows(x).transpose(0, 3, 2, 1)

    assert "permute" in same(over_rows, x)
    assert "permute" in same(turned, x)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", ["auto", ["batch, _, _"]])
def test_a_place_in_each_row_is_an_index(sizes):
    def chosen(x):
        return x[0] + x[..., 1, :] - x[-1], x[1:3], x[:, 2]

    x = jax.random.normal(jax.random.key(0), (2, 5, 4))
    source, _, _ = translate(jax.vmap(chosen), "torch", (x,), None, sizes)
    source.code.partition("(nn.Module)")[2]
    found = run_file(source)[source.name]()(torch.tensor(np.asarray(x)))
    for one, other in zip(found, jax.vmap(chosen)(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.nightly
def test_a_place_beyond_a_shorter_row_raises():
    source, _, _ = translate(jax.vmap(lambda x: x[3] * 2), "torch", (jnp.ones((2, 5, 4)),))
    model = run_file(source)[source.name]()
    model(torch.ones(2, 4, 4))
    with pytest.raises((ValueError, IndexError)):
        model(torch.ones(2, 3, 4))


@pytest.mark.nightly
def test_another_scale_of_queries_stays():
    model = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))

    def attend(q, k, v):
        q, k, v = (jax.vmap(one)(x).reshape(5, 2, 4) for one, x in (
            (model.query_proj, q), (model.key_proj, k), (model.value_proj, v)))  # fmt: skip
        weights = jax.nn.softmax(jnp.einsum("shd,Shd->hsS", q / 3.0, k), axis=-1)
        return jnp.einsum("hsS,Shd->shd", weights, v)

    x = jax.random.normal(jax.random.key(1), (5, 8))
    _source, _, proof = translate(attend, "torch", (x, x, x), proved=True)
    assert proof
