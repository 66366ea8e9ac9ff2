"""The network of Equinox's MNIST example."""

import equinox as eqx
import jax
import jax.numpy as jnp


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        key1, key2, key3, key4 = jax.random.split(key, 4)
        # Standard CNN setup: convolutional layer, followed by flattening,
        # with a small MLP on top.
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=key1),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(192, 16, key=key2),
            jax.nn.sigmoid,
            eqx.nn.Linear(16, 8, key=key3),
            jax.nn.relu,
            eqx.nn.Linear(8, 4, key=key4),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build():
    """Returns a small model, its inputs, and the arguments of its class and its call."""
    x = jax.random.normal(jax.random.key(1), (1, 12, 12), jnp.float32)
    return CNN(jax.random.key(0)), (x,), ((), {}), {}
