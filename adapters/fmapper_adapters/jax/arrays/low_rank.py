"""A matrix with a low-rank update beside it, which need not be added up to multiply with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LowRankSum:
    """The matrix `weight + left @ right`.

    Where a program multiplies with it, it multiplies with each part, so that neither the sum nor a
    gradient of its size is ever in memory. Any other operation gets the sum.
    """

    weight: Any
    left: Any
    right: Any

    def merge(self) -> jax.Array:
        """Returns the sum, of the dtype of the weight."""
        wide = self.weight.astype(self.left.dtype) + self.left @ self.right
        return jnp.asarray(wide, self.weight.dtype)

    def after(self, x: Any, product: Any, *, transposes: bool) -> jax.Array:
        """Adds what the update makes of `x` to its product with the weight, or its transpose."""
        first, second = (self.right.T, self.left.T) if transposes else (self.left, self.right)
        update = (x.astype(first.dtype) @ first) @ second
        return jnp.asarray(product + update.astype(product.dtype))


def merge_parts(array: Any) -> Any:
    """Returns the sum of one that is given in parts; anything else as it is."""
    return array.merge() if isinstance(array, LowRankSum) else array
