"""A multilayer perceptron of as many layers as it is given sizes, as Flax's guides write it."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn


class MLP(nn.Module):
    """Layers with an activation in between."""

    features: Sequence[int]
    activation: Callable = nn.relu
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, *, train: bool = False):
        # the last layer has no activation
        for i, feat in enumerate(self.features):
            x = nn.Dense(feat)(x)
            if i != len(self.features) - 1:
                x = self.activation(x)
                x = nn.Dropout(self.dropout, deterministic=not train)(x)
        scale = self.param("scale", nn.initializers.ones, (self.features[-1],))
        return x * scale


def build():
    """Returns a small model with its variables, its inputs, and the keywords of its call."""
    x = jax.random.normal(jax.random.key(1), (4, 5), jnp.float32)
    module = MLP((8, 8, 3), activation=nn.gelu)
    rngs = {"dropout": jax.random.key(2)}
    return (module, module.init(jax.random.key(0), x)), (x,), {"train": False, "rngs": rngs}
