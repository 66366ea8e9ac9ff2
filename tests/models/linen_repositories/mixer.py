"""An MLP-Mixer with stochastic depth, in the manner of google-research/vision_transformer."""

from collections.abc import Callable
from typing import Any

import einops
import jax
import jax.numpy as jnp
from flax import linen as nn


class MlpBlock(nn.Module):
    mlp_dim: int
    activation: Callable[[Any], Any] = nn.gelu

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.mlp_dim)(x)
        y = self.activation(y)
        return nn.Dense(x.shape[-1])(y)


class MixerBlock(nn.Module):
    """Mixer block layer."""

    tokens_mlp_dim: int
    channels_mlp_dim: int
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, deterministic):
        y = nn.LayerNorm()(x)
        y = jnp.swapaxes(y, 1, 2)
        y = MlpBlock(self.tokens_mlp_dim, name="token_mixing")(y)
        y = jnp.swapaxes(y, 1, 2)
        drop = nn.Dropout(rate=self.rate, broadcast_dims=(1, 2))
        x = x + drop(y, deterministic=deterministic)
        y = nn.LayerNorm()(x)
        y = MlpBlock(self.channels_mlp_dim, name="channel_mixing")(y)
        return x + drop(y, deterministic=deterministic)


class MlpMixer(nn.Module):
    """Mixer architecture."""

    patch_size: int
    num_classes: int
    num_blocks: int
    hidden_dim: int
    tokens_mlp_dim: int
    channels_mlp_dim: int
    stoch_depth: float = 0.0

    @nn.compact
    def __call__(self, inputs, *, train=False):
        size = (self.patch_size, self.patch_size)
        x = nn.Conv(self.hidden_dim, size, strides=size, name="stem")(inputs)
        x = einops.rearrange(x, "n h w c -> n (h w) c")
        for i in range(self.num_blocks):
            rate = (i / max(self.num_blocks - 1, 1)) * self.stoch_depth
            block = MixerBlock(self.tokens_mlp_dim, self.channels_mlp_dim, rate)
            x = block(x, deterministic=not train)
        x = nn.LayerNorm(name="pre_head_layer_norm")(x)
        x = jnp.mean(x, axis=1)
        if self.num_classes:
            x = nn.Dense(self.num_classes, name="head")(x)
        return x


def build():
    """Returns a small model with its variables, its inputs, and the keywords of its call."""
    module = MlpMixer(4, 5, 2, 12, 6, 10, stoch_depth=0.3)
    images = jax.random.normal(jax.random.key(1), (3, 8, 8, 3))
    variables = module.init(jax.random.key(0), images)
    return (module, variables), (images,), {"rngs": {"dropout": jax.random.key(2)}}
