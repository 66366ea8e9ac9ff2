"""A U-Net of diffusion with time embeddings, in the manner of DDPM in Flax."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


def timestep_embedding(timesteps, dim: int, max_period: int = 10_000):
    """Sinusoidal embeddings, half of them sines."""
    half = dim // 2
    freqs = jnp.exp(-np.log(max_period) * jnp.arange(half, dtype=jnp.float32) / half)
    args = timesteps[:, None].astype(jnp.float32) * freqs[None]
    return jnp.concatenate([jnp.cos(args), jnp.sin(args)], axis=-1)


class ResnetBlock(nn.Module):
    features: int
    groups: int = 2
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, temb, train: bool):
        h = nn.swish(nn.GroupNorm(num_groups=self.groups)(x))
        h = nn.Conv(self.features, (3, 3))(h)
        h = h + nn.Dense(self.features)(nn.swish(temb))[:, None, None, :]
        h = nn.swish(nn.GroupNorm(num_groups=self.groups)(h))
        h = nn.Dropout(self.dropout)(h, deterministic=not train)
        h = nn.Conv(self.features, (3, 3), kernel_init=nn.initializers.zeros_init())(h)
        if x.shape[-1] != self.features:
            x = nn.Conv(self.features, (1, 1), name="shortcut")(x)
        return x + h


class UNet(nn.Module):
    dim: int
    mults: Sequence[int] = (1, 2)
    channels: int = 3
    block: Any = ResnetBlock

    @nn.compact
    def __call__(self, x, time, train: bool = False):
        temb = timestep_embedding(time, self.dim)
        temb = nn.Dense(4 * self.dim)(nn.swish(nn.Dense(4 * self.dim)(temb)))
        h = nn.Conv(self.dim, (3, 3), name="init_conv")(x)
        skips = []
        for level, mult in enumerate(self.mults):
            h = self.block(self.dim * mult)(h, temb, train)
            skips.append(h)
            if level < len(self.mults) - 1:
                h = nn.avg_pool(h, (2, 2), strides=(2, 2))
        h = self.block(self.dim * self.mults[-1], dropout=0.1, name="middle")(h, temb, train)
        for level, mult in reversed(list(enumerate(self.mults))):
            h = jnp.concatenate([h, skips.pop()], axis=-1)
            h = self.block(self.dim * mult)(h, temb, train)
            if level > 0:
                b, height, width, c = h.shape
                h = jax.image.resize(h, (b, height * 2, width * 2, c), "nearest")
                h = nn.Conv(c, (3, 3), name=f"up_{level}")(h)
        return nn.Conv(self.channels, (1, 1), name="out")(nn.swish(h))


def build():
    """Returns a small model with its variables, its inputs, and the keywords of its call."""
    module = UNet(4)
    images = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    time = jnp.array([3, 700])
    variables = module.init(jax.random.key(0), images, time)
    return (module, variables), (images, time), {"rngs": {"dropout": jax.random.key(2)}}
