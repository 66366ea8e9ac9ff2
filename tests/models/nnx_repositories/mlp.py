"""A multilayer perceptron whose activation is chosen by its name."""

from collections.abc import Callable, Sequence

import jax
from flax import nnx

ACTIVATIONS: dict[str, Callable] = {"relu": nnx.relu, "gelu": nnx.gelu, "tanh": nnx.tanh}


class MLP(nnx.Module):
    def __init__(
        self,
        din: int,
        hidden: Sequence[int],
        dout: int,
        activation: str = "relu",
        dropout: float = 0.1,
        *,
        rngs: nnx.Rngs,
    ):
        sizes = [din, *hidden]
        self.layers = nnx.List(
            nnx.Linear(
                sizes[i],
                sizes[i + 1],
                kernel_init=nnx.initializers.he_normal(),
                rngs=rngs,
            )
            for i in range(len(hidden))
        )
        self.norm = nnx.LayerNorm(sizes[-1], rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(sizes[-1], dout, rngs=rngs)
        self.activation = ACTIVATIONS[activation]
        # scales what the network adds
        self.gain = nnx.Param(jax.numpy.full((dout,), 0.5))

    def __call__(self, x, *, deterministic: bool = False):
        for i, layer in enumerate(self.layers):
            y = self.activation(layer(x))
            x = x + y if i > 0 else y
        x = self.norm(x)
        if not deterministic:
            x = self.dropout(x)
        return self.out(x) * self.gain


def build():
    """Returns a small model, its inputs, and the arguments of its class."""
    x = jax.random.normal(jax.random.key(1), (4, 5))
    arguments = ((5, [8, 8], 3), {"activation": "gelu"})
    return MLP(5, [8, 8], 3, activation="gelu", rngs=nnx.Rngs(0)), (x,), arguments
