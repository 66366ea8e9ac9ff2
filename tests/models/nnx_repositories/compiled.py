"""A model with a function that is compiled by itself."""

import jax
import jax.numpy as jnp
from flax import nnx


@jax.jit
def double(x):
    return jnp.multiply(x, 2.0)


class Compiled(nnx.Module):
    def __call__(self, x):
        return double(x) + double(x[:1])
