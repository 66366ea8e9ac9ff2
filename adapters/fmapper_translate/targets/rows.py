"""Rows that a function picks by values, in arrays of a size that is known.

A file takes the source of what it names.
"""

from __future__ import annotations

import jax.numpy as jnp


def nonzero(mask):
    """Returns the indices of elements that hold, then indices beyond any end for the others."""
    return jnp.nonzero(mask, size=mask.size, fill_value=jnp.iinfo(jnp.int32).max)
