"""The largest of many numbers, beside sorting and JAX's own functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fmapper_adapters.jax.generation import ranking

# few different numbers, so that there are ties
_NUMBERS = st.sampled_from([0.0, 1.5, -2.5, 3e38, -3e38, 1e-45, np.inf, -np.inf])
_ROWS = arrays.arrays(np.float32, (2, 9), elements=_NUMBERS | st.floats(width=32, allow_nan=False))


@pytest.mark.nightly
@given(_ROWS, st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_ranks_are_those_of_jax(rows: Any, k: int) -> None:
    x = jnp.asarray(rows + 0.0)  # no negative zeros, which jax.lax.top_k sorts below others
    values, indices = jax.lax.top_k(x, k)
    found, at = ranking.top_k(x, k)
    np.testing.assert_array_equal(at, indices)
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(ranking.kth_largest(x, k), values[:, -1:])
    np.testing.assert_array_equal(ranking.argmax(x), x.argmax(-1))


@pytest.mark.nightly_cases("row1", "row0")
@pytest.mark.parametrize("row", [[1.0, np.nan, np.inf], [-np.nan, 3.0, np.nan], [-0.0, 0.0, -1.0]])
def test_what_is_no_number_is_the_largest(row: list[float]) -> None:
    x = jnp.asarray([row], jnp.float32)
    assert ranking.argmax(x).tolist() == x.argmax(-1).tolist()
    if np.isnan(row).any():
        assert np.isnan(ranking.top_k(x, 1)[0]).all()
        assert np.isnan(ranking.kth_largest(x, 1)).all()


@pytest.mark.nightly
@given(_ROWS, st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
@settings(deadline=None, max_examples=60)
def test_numbers_below_the_least_weigh_at_most_the_share(rows: Any, share: float) -> None:
    weights = np.full(rows.shape, 0.125, np.float32)  # their sums are exact
    least = np.asarray(ranking.least_of_share(jnp.asarray(rows), jnp.asarray(weights), share))
    for row, own, lowest in zip(rows, weights, least[:, 0], strict=True):
        may_drop = [x for x in row if own[row <= x].sum() <= share and x < row.max()]
        assert {x for x in row if x < lowest} == set(may_drop)


@pytest.mark.nightly
def test_rows_are_ranked_within_jit_and_loops() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 5000))
    values, indices = jax.jit(ranking.top_k, static_argnums=1)(x, 50)
    np.testing.assert_array_equal(indices, jax.lax.top_k(x, 50)[1])
    np.testing.assert_array_equal(
        jax.jit(ranking.kth_largest, static_argnums=1)(x, 50), values[:, -1:]
    )
