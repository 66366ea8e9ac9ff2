"""A convolutional classifier, as tutorials of NNX write it."""

import jax
import jax.numpy as jnp
from flax import nnx


class ConvBlock(nnx.Module):
    def __init__(self, in_ch: int, out_ch: int, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(in_ch, out_ch, kernel_size=(3, 3), padding="SAME", rngs=rngs)
        self.bn = nnx.BatchNorm(out_ch, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.bn(self.conv(x)))


class CNN(nnx.Module):
    """Two blocks and a head.

    Images have their channels last.
    """

    def __init__(
        self, num_classes: int = 10, features: tuple[int, ...] = (32, 64), *, rngs: nnx.Rngs
    ):
        widths = (1, *features)
        self.blocks = nnx.List(
            [ConvBlock(a, b, rngs=rngs) for a, b in zip(widths[:-1], widths[1:], strict=True)]
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(features[-1], num_classes, rngs=rngs)

    def __call__(self, x: jax.Array):
        for block in self.blocks:
            x = nnx.avg_pool(block(x), window_shape=(2, 2), strides=(2, 2))
        x = jnp.mean(x, axis=(1, 2))  # global average pooling
        return self.head(self.dropout(x))


def build():
    """Returns a small model, its inputs, and the arguments of its class."""
    x = jax.random.normal(jax.random.key(1), (3, 8, 8, 1))
    return CNN(4, (4, 6), rngs=nnx.Rngs(0)), (x,), ((4, (4, 6)), {})
