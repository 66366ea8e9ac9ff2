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


def test_what_pools_other_dimensions_still_moves_them():
    x = jax.random.normal(jax.random.key(0), (2, 6, 8, 3))

    def over_rows(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def turned(x):
        return over_rows(x).transpose(0, 3, 2, 1)

    assert "permute" in same(over_rows, x)
    assert "permute" in same(turned, x)
