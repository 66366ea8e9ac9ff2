"""An encoder of texts, in the manner of Flax's examples WMT and ViT."""

from collections.abc import Callable
from dataclasses import field
from typing import Any

import jax
from flax import linen as nn


class AddPositionEmbs(nn.Module):
    """Adds learned positional embeddings to the inputs."""

    posemb_init: Callable[..., Any] = nn.initializers.normal(stddev=0.02)

    @nn.compact
    def __call__(self, inputs):
        assert inputs.ndim == 3, f"{inputs.ndim} dimensions"
        pos_emb_shape = (1, inputs.shape[1], inputs.shape[2])
        pe = self.param("pos_embedding", self.posemb_init, pos_emb_shape)
        return inputs + pe


class MlpBlock(nn.Module):
    """Transformer MLP / feed-forward block."""

    mlp_dim: int
    out_dim: int | None = None
    dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, inputs, *, deterministic: bool):
        actual_out_dim = inputs.shape[-1] if self.out_dim is None else self.out_dim
        x = nn.Dense(
            features=self.mlp_dim,
            kernel_init=nn.initializers.xavier_uniform(),
            bias_init=nn.initializers.normal(stddev=1e-6),
        )(inputs)
        x = nn.gelu(x)
        x = nn.Dropout(rate=self.dropout_rate)(x, deterministic=deterministic)
        output = nn.Dense(features=actual_out_dim)(x)
        return nn.Dropout(rate=self.dropout_rate)(output, deterministic=deterministic)


class Encoder1DBlock(nn.Module):
    """Transformer encoder layer."""

    mlp_dim: int
    num_heads: int
    dropout_rate: float = 0.1
    attention_dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, inputs, *, deterministic: bool):
        # Attention block.
        x = nn.LayerNorm()(inputs)
        x = nn.MultiHeadDotProductAttention(
            kernel_init=nn.initializers.xavier_uniform(),
            broadcast_dropout=False,
            deterministic=deterministic,
            dropout_rate=self.attention_dropout_rate,
            num_heads=self.num_heads,
        )(x, x)
        x = nn.Dropout(rate=self.dropout_rate)(x, deterministic=deterministic)
        x = x + inputs

        # MLP block.
        y = nn.LayerNorm()(x)
        y = MlpBlock(mlp_dim=self.mlp_dim, dropout_rate=self.dropout_rate)(
            y, deterministic=deterministic
        )
        return x + y


class Encoder(nn.Module):
    """Embeds tokens, and applies the layers."""

    vocab_size: int
    width: int
    num_layers: int
    mlp_dim: int
    num_heads: int
    num_classes: int = 2
    dropout_rate: float = 0.1
    names: list[str] = field(default_factory=list)

    def setup(self):
        self.embed = nn.Embed(self.vocab_size, self.width)
        self.positions = AddPositionEmbs()
        self.layers = [
            Encoder1DBlock(self.mlp_dim, self.num_heads, self.dropout_rate)
            for _ in range(self.num_layers)
        ]
        self.norm = nn.LayerNorm()
        self.head = nn.Dense(self.num_classes, kernel_init=nn.initializers.normal(0.5))

    def __call__(self, tokens, *, train: bool = False):
        x = self.positions(self.embed(tokens))
        for layer in self.layers:
            x = layer(x, deterministic=not train)
        return self.head(self.norm(x).mean(axis=1))


def build():
    """Returns a small model with its variables, its inputs, and the keywords of its call."""
    tokens = jax.random.randint(jax.random.key(1), (3, 6), 0, 11)
    module = Encoder(11, 8, 2, 16, 2)
    rngs = {"dropout": jax.random.key(2)}
    return (
        (module, module.init(jax.random.key(0), tokens)),
        (tokens,),
        {"train": False, "rngs": rngs},
    )
