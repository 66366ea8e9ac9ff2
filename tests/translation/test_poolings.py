"""Poolings of models of Equinox, which have their channels first, are those of torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fmapper.translation import run_file
from fmapper.translation.source import translate

eqx = pytest.importorskip("equinox")

POOLS = {
    "max": eqx.nn.MaxPool2d(2, 2),
    "side by side": eqx.nn.MaxPool2d((3, 2), (1, 2), padding=1),
    "mean": eqx.nn.AvgPool2d(2, 2),
    "lines": eqx.nn.MaxPool1d(3),
    "of all": eqx.nn.MaxPool2d((6, 8)),
}


def same(model, x):
    """Returns the methods of the file, after it was compared with the model."""
    source, _, _ = translate(model, "torch", (x,))
    built = run_file(source)[source.name]()
    found = built(torch.tensor(np.asarray(x)))
    np.testing.assert_allclose(found.detach(), model(x), rtol=1e-5, atol=1e-6)
    return source.code[source.code.index("(nn.Module)") :].partition("def load_weights")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("is_batch", [False, True])
def test_a_pooling_is_one_call(kind, channels, is_batch):
    pool = POOLS[kind]
    shape = (channels, 6) if kind == "lines" else (channels, 6, 8)
    shape = (2, *shape) if is_batch else shape
    x = jax.random.normal(jax.random.key(0), shape)
    code = same(jax.vmap(pool) if is_batch else pool, x)
    assert "_pool" in code
    assert "permute" not in code
    if kind not in ("lines", "mean"):
        assert "reshape" not in code


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
    code = source.code.partition("(nn.Module)")[2]
    last = "x[:, -1]" if sizes == "auto" else "x[:, 4]"
    assert all(one in code for one in ("x[:, 0]", "x[:, 1]", last, "x[:, :, 2]"))
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
@pytest.mark.parametrize("is_batch", [False, True])
def test_attention_of_equinox_has_the_usual_scale(is_batch):
    model = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, 5, 8) if is_batch else (5, 8))

    def attend(x):
        return model(x, x, x)

    run = jax.vmap(attend) if is_batch else attend
    source, _, _ = translate(run, "torch", (x,))
    assert "scaled_dot_product_attention(" in source.code
    assert "scale=" not in source.code
    assert "/ 2.0" not in source.code


@pytest.mark.nightly
def test_another_scale_of_queries_stays():
    model = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))

    def attend(q, k, v):
        q, k, v = (jax.vmap(one)(x).reshape(5, 2, 4) for one, x in (
            (model.query_proj, q), (model.key_proj, k), (model.value_proj, v)))  # fmt: skip
        weights = jax.nn.softmax(jnp.einsum("shd,Shd->hsS", q / 3.0, k), axis=-1)
        return jnp.einsum("hsS,Shd->shd", weights, v)

    x = jax.random.normal(jax.random.key(1), (5, 8))
    source, _, proof = translate(attend, "torch", (x, x, x), proved=True)
    assert proof
    assert "scale=" in source.code or "/ 3.0" in source.code
