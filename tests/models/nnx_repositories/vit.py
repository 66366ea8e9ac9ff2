"""A vision transformer, as ports to NNX write it."""

import jax
import jax.numpy as jnp
from flax import nnx


class PatchEmbed(nnx.Module):
    """Image to patches."""

    def __init__(self, img_size=224, patch_size=16, in_chans=3, embed_dim=768, *, rngs: nnx.Rngs):
        self.grid_size = img_size // patch_size
        self.num_patches = self.grid_size**2
        self.proj = nnx.Conv(
            in_chans,
            embed_dim,
            kernel_size=(patch_size, patch_size),
            strides=(patch_size, patch_size),
            padding="VALID",
            rngs=rngs,
        )

    def __call__(self, x):
        x = self.proj(x)
        batch, height, width, dim = x.shape
        return jnp.reshape(x, (batch, height * width, dim))


class MlpBlock(nnx.Module):
    def __init__(self, dim: int, hidden: int, rate: float = 0.0, *, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(dim, hidden, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)
        self.fc2 = nnx.Linear(hidden, dim, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, *, deterministic: bool = True):
        x = nnx.gelu(self.fc1(x), approximate=False)
        x = self.drop(x, deterministic=deterministic)
        return self.drop(self.fc2(x), deterministic=deterministic)


class EncoderBlock(nnx.Module):
    def __init__(self, dim, num_heads, mlp_ratio=4.0, rate=0.0, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(
            num_heads=num_heads, in_features=dim, dropout_rate=rate, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(dim, rngs=rngs)
        self.mlp = MlpBlock(dim, int(dim * mlp_ratio), rate, rngs=rngs)

    def __call__(self, x, *, deterministic: bool = True):
        x = x + self.attn(self.norm1(x), deterministic=deterministic)
        return x + self.mlp(self.norm2(x), deterministic=deterministic)


class VisionTransformer(nnx.Module):
    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        pool: str = "cls",
        *,
        rngs: nnx.Rngs,
    ):
        self.pool = pool
        self.patch_embed = PatchEmbed(img_size, patch_size, 3, embed_dim, rngs=rngs)
        num_patches = self.patch_embed.num_patches
        self.cls_token = nnx.Param(jnp.zeros((1, 1, embed_dim)))
        init = nnx.initializers.truncated_normal(0.02)
        self.pos_embed = nnx.Param(
            init(rngs.params(), (1, num_patches + 1, embed_dim), jnp.float32)
        )
        self.blocks = nnx.List(
            [EncoderBlock(embed_dim, num_heads, rngs=rngs) for _ in range(depth)]
        )
        self.norm = nnx.LayerNorm(embed_dim, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(embed_dim, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        x = self.patch_embed(x)
        cls_token = jnp.broadcast_to(self.cls_token.value, (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([cls_token, x], axis=1)
        x = x + self.pos_embed[...]
        for block in self.blocks:
            x = block(x, deterministic=deterministic)
        x = self.norm(x)
        if self.pool == "cls":
            x = x[:, 0]
        else:
            x = x[:, 1:].mean(axis=1)
        return self.head(x)


def build():
    """Returns a small model, its inputs, and the arguments of its class."""
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    arguments = (8, 4, 5, 8, 2, 2)
    return VisionTransformer(*arguments, rngs=nnx.Rngs(0)), (x,), (arguments, {})
