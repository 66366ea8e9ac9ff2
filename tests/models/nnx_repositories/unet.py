"""A U-Net of a diffusion model, as repositories write it."""

import math

import jax
import jax.numpy as jnp
from flax import nnx


def timestep_embedding(t, dim, max_period=10000.0):
    """Sinusoidal embeddings of the steps of diffusion."""
    half = dim // 2
    freqs = jnp.exp(-math.log(max_period) * jnp.arange(0, half, dtype=jnp.float32) / half)
    args = t[:, None].astype(jnp.float32) * freqs[None]
    emb = jnp.concatenate([jnp.cos(args), jnp.sin(args)], axis=-1)
    if dim % 2:
        emb = jnp.pad(emb, ((0, 0), (0, 1)))
    return emb


class ResBlock(nnx.Module):
    def __init__(self, in_ch, out_ch, emb_dim, groups=4, *, rngs):
        self.norm1 = nnx.GroupNorm(in_ch, num_groups=groups, rngs=rngs)
        self.conv1 = nnx.Conv(in_ch, out_ch, (3, 3), rngs=rngs)
        self.emb = nnx.Linear(emb_dim, out_ch, rngs=rngs)
        self.norm2 = nnx.GroupNorm(out_ch, num_groups=groups, rngs=rngs)
        self.conv2 = nnx.Conv(out_ch, out_ch, (3, 3), kernel_init=nnx.initializers.zeros, rngs=rngs)
        self.skip = nnx.Conv(in_ch, out_ch, (1, 1), rngs=rngs) if in_ch != out_ch else None

    def __call__(self, x, emb):
        h = self.conv1(nnx.silu(self.norm1(x)))
        h = h + self.emb(nnx.silu(emb))[:, None, None, :]
        h = self.conv2(nnx.silu(self.norm2(h)))
        return h + (self.skip(x) if self.skip is not None else x)


class Downsample(nnx.Module):
    def __init__(self, ch, *, rngs):
        self.conv = nnx.Conv(ch, ch, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)), rngs=rngs)

    def __call__(self, x):
        return self.conv(x)


class Upsample(nnx.Module):
    def __init__(self, ch, *, rngs):
        self.conv = nnx.Conv(ch, ch, (3, 3), rngs=rngs)

    def __call__(self, x):
        B, H, W, C = x.shape
        x = jax.image.resize(x, (B, H * 2, W * 2, C), method="nearest")
        return self.conv(x)


class UNet(nnx.Module):
    def __init__(self, in_ch=3, base=32, mults=(1, 2), emb_dim=128, *, rngs: nnx.Rngs):
        self.base = base
        self.time_mlp = nnx.Sequential(
            nnx.Linear(base, emb_dim, rngs=rngs), nnx.silu, nnx.Linear(emb_dim, emb_dim, rngs=rngs)
        )
        self.stem = nnx.Conv(in_ch, base, (3, 3), rngs=rngs)
        chs = [base * m for m in mults]
        downs, ups = [], []
        ch = base
        for i, out in enumerate(chs):
            downs.append(ResBlock(ch, out, emb_dim, rngs=rngs))
            if i < len(chs) - 1:
                downs.append(Downsample(out, rngs=rngs))
            ch = out
        for i, out in reversed(list(enumerate(chs))):
            ups.append(ResBlock(ch + out, out, emb_dim, rngs=rngs))
            if i > 0:
                ups.append(Upsample(out, rngs=rngs))
            ch = out
        self.downs, self.ups = nnx.List(downs), nnx.List(ups)
        self.out = nnx.Conv(ch, in_ch, (3, 3), rngs=rngs)

    def __call__(self, x, t):
        emb = self.time_mlp(timestep_embedding(t, self.base))
        x = self.stem(x)
        skips = []
        for layer in self.downs:
            if isinstance(layer, Downsample):
                x = layer(x)
            else:
                x = layer(x, emb)
                skips.append(x)
        for layer in self.ups:
            if isinstance(layer, Upsample):
                x = layer(x)
            else:
                x = layer(jnp.concatenate([x, skips.pop()], axis=-1), emb)
        return self.out(nnx.silu(x))


def build():
    """Returns a small model, its inputs, and the arguments of its class."""
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    t = jnp.array([3, 70])
    arguments = (3, 8, (1, 2), 12)
    return UNet(*arguments, rngs=nnx.Rngs(0)), (x, t), (arguments, {})
