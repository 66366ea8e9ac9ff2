"""A perceptron over batches with a parameter of its own, as Equinox's guides write it."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp


class Residual(eqx.Module):
    """Adds what a layer gives."""

    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    activation: Callable = eqx.field(static=True)

    def __init__(self, size, activation, *, key):
        self.linear = eqx.nn.Linear(size, size, use_bias=False, key=key)
        self.norm = eqx.nn.LayerNorm(size)
        self.activation = activation

    def __call__(self, x):
        return x + self.activation(self.linear(self.norm(x)))


class Net(eqx.Module):
    embed: eqx.nn.Linear
    blocks: list[Residual]
    dropout: eqx.nn.Dropout
    head: eqx.nn.MLP
    extra_bias: jax.Array

    def __init__(self, in_size, out_size, width=8, depth=2, *, key):
        ekey, hkey, *keys = jax.random.split(key, depth + 2)
        self.embed = eqx.nn.Linear(in_size, width, key=ekey)
        self.blocks = [Residual(width, jax.nn.gelu, key=k) for k in keys]
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.MLP(width, out_size, 2 * width, 1, activation=jnp.tanh, key=hkey)
        self.extra_bias = jnp.ones(out_size)

    def __call__(self, x, *, key=None):
        x = jax.vmap(self.embed)(x)
        for block in self.blocks:
            x = jax.vmap(block)(x)  # over the batch
        x = self.dropout(x, key=key)
        return jax.vmap(self.head)(x) + self.extra_bias


def build():
    """Returns a small model, its inputs, and the arguments of its class and its call."""
    x = jax.random.normal(jax.random.key(1), (4, 5), jnp.float32)
    return Net(5, 3, key=jax.random.key(0)), (x,), ((5, 3), {}), {"key": jax.random.key(2)}
