"""An MLP-Mixer, in the manner of Equinox's example of a score-based model."""

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class MixerBlock(eqx.Module):
    patch_mixer: eqx.nn.MLP
    hidden_mixer: eqx.nn.MLP
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, num_patches, hidden_size, mix_patch_size, mix_hidden_size, *, key):
        tkey, ckey = jr.split(key, 2)
        self.patch_mixer = eqx.nn.MLP(num_patches, num_patches, mix_patch_size, depth=1, key=tkey)
        self.hidden_mixer = eqx.nn.MLP(hidden_size, hidden_size, mix_hidden_size, depth=1, key=ckey)
        self.norm1 = eqx.nn.LayerNorm((hidden_size, num_patches))
        self.norm2 = eqx.nn.LayerNorm((num_patches, hidden_size))

    def __call__(self, y):
        y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
        y = einops.rearrange(y, "c p -> p c")
        y = y + jax.vmap(self.hidden_mixer)(self.norm2(y))
        return einops.rearrange(y, "p c -> c p")


class Mixer2d(eqx.Module):
    conv_in: eqx.nn.Conv2d
    head: eqx.nn.Linear
    blocks: list
    norm: eqx.nn.LayerNorm
    t1: float

    def __init__(
        self, img_size, patch_size, hidden_size, mix_patch_size, mix_hidden_size, num_blocks, t1,
        *, key,
    ):  # fmt: skip
        input_size, height, width = img_size
        assert (height % patch_size) == 0
        assert (width % patch_size) == 0
        num_patches = (height // patch_size) * (width // patch_size)
        inkey, outkey, *bkeys = jr.split(key, 2 + num_blocks)
        self.conv_in = eqx.nn.Conv2d(
            input_size + 1, hidden_size, patch_size, stride=patch_size, key=inkey
        )
        self.head = eqx.nn.Linear(hidden_size, input_size, key=outkey)
        self.blocks = [
            MixerBlock(num_patches, hidden_size, mix_patch_size, mix_hidden_size, key=bkey)
            for bkey in bkeys
        ]
        self.norm = eqx.nn.LayerNorm((hidden_size, num_patches))
        self.t1 = t1

    def __call__(self, t, y):
        t = t / self.t1
        _, height, width = y.shape
        t = jnp.broadcast_to(t, (1, height, width))
        y = jnp.concatenate([y, t])
        y = self.conv_in(y)
        y = einops.rearrange(y, "c h w -> c (h w)")
        for block in self.blocks:
            y = block(y)
        y = self.norm(y)
        return self.head(jnp.mean(y, axis=1))


def build():
    """Returns a small model, its inputs, the arguments that made it, and a call's keywords."""
    sizes = ((1, 8, 8), 4, 6, 5, 7, 2, 10.0)
    inputs = (jnp.array(3.0), jr.normal(jr.key(1), (1, 8, 8)))
    return Mixer2d(*sizes, key=jr.key(0)), inputs, (sizes, {}), {}
