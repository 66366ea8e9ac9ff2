"""A convolutional network with statistics of batches, as Flax's MNIST example writes it."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class CNN(nn.Module):
    """Classifies images."""

    num_classes: int = 10
    use_bias: bool = True

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(features=8, kernel_size=(3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=16, kernel_size=(3, 3), use_bias=self.use_bias)(x)
        x = nn.BatchNorm(not train)(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))  # flatten
        x = nn.Dense(features=32)(x)
        x = nn.relu(x)
        x = nn.Dropout(rate=0.2, deterministic=not train)(x)
        return nn.Dense(features=self.num_classes)(x)


def build():
    """Returns a small model with its variables, its inputs, and the keywords of its call."""
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 1), jnp.float32)
    module = CNN(5)
    rngs = {"dropout": jax.random.key(2)}
    return (
        (module, module.init(jax.random.key(0), x, train=False)),
        (x,),
        {"train": False, "rngs": rngs},
    )
