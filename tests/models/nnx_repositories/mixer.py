"""An MLP-Mixer with drop path, as repositories write it."""

import jax
import jax.numpy as jnp
from flax import nnx


class DropPath(nnx.Module):
    """Leaves a branch out for some of the samples."""

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        self.rate = rate
        self.deterministic = False
        self.rngs = rngs

    def __call__(self, x):
        if self.deterministic or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        mask = jax.random.bernoulli(self.rngs.dropout(), keep, shape)
        return jnp.where(mask, x / keep, 0.0)


class Mlp(nnx.Module):
    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(dim, hidden, rngs=rngs)
        self.fc2 = nnx.Linear(hidden, dim, rngs=rngs)

    def __call__(self, x):
        return self.fc2(jax.nn.gelu(self.fc1(x)))


class MixerBlock(nnx.Module):
    def __init__(self, tokens: int, dim: int, rate: float, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.token_mlp = Mlp(tokens, 2 * tokens, rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, rngs=rngs)
        self.channel_mlp = Mlp(dim, 4 * dim, rngs=rngs)
        self.drop_path = DropPath(rate, rngs=rngs)
        self.scale = nnx.Param(1e-1 * jnp.ones(dim))

    def __call__(self, x):
        y = jnp.swapaxes(self.norm1(x), 1, 2)
        y = jnp.swapaxes(self.token_mlp(y), 1, 2)
        x = x + self.drop_path(y * self.scale)
        return x + self.drop_path(self.channel_mlp(self.norm2(x)))


class MlpMixer(nnx.Module):
    def __init__(
        self, image=32, patch=4, dim=128, depth=4, num_classes=10, drop_path=0.1, *, rngs: nnx.Rngs
    ):
        self.patch = patch
        tokens = (image // patch) ** 2
        self.stem = nnx.Linear(3 * patch * patch, dim, rngs=rngs)
        rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nnx.List([MixerBlock(tokens, dim, r, rngs=rngs) for r in rates])
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, num_classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x):
        B, H, W, C = x.shape
        p = self.patch
        x = x.reshape(B, H // p, p, W // p, p, C)
        x = jnp.transpose(x, (0, 1, 3, 2, 4, 5)).reshape(B, -1, p * p * C)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def build():
    """Returns a small model, its inputs, and the arguments of its class."""
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    arguments = (8, 4, 8, 2, 3, 0.5)
    return MlpMixer(*arguments, rngs=nnx.Rngs(0)), (x,), (arguments, {})
