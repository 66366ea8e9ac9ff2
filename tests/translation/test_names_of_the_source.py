"""Files keep what the source calls its functions, its variables, and what it computes at once."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flax.nnx")

import jax.numpy as jnp

from fmapper.translation.code import text
from fmapper_adapters.flax.translation.dialect import FlaxDialect


@pytest.mark.nightly_cases("two_numbers")
@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.triu(np.full((4, 4), -np.inf, np.float32), 1),
         "jnp.triu(jnp.full((4, 4), -jnp.inf, jnp.float32), 1)"),
        (~np.tri(4, dtype=bool), "jnp.triu(jnp.ones((4, 4), bool), 1)"),
        (np.tri(4, 4, -1, dtype=np.int32), "jnp.tril(jnp.ones((4, 4), jnp.int32), -1)"),
        (np.where(np.tri(3, 5, dtype=bool), 1, -9).astype(np.float32),
         "jnp.where(jnp.tri(3, 5, dtype=bool), jnp.ones((3, 5), jnp.float32), "
         "jnp.full((3, 5), -9.0, jnp.float32))"),
        (np.float32(np.inf) * np.ones(3, np.float32), "jnp.full((3,), jnp.inf, jnp.float32)"),
    ],
    ids=["mask", "hidden", "below", "two_numbers", "infinite"],
)  # fmt: skip
def test_masks_are_code_for_the_same_numbers(array, code):
    found = text(FlaxDialect().constant(array))
    made = np.asarray(eval(found, {"jnp": jnp}))
    assert (made.dtype, made.tobytes()) == (array.dtype, array.tobytes())
