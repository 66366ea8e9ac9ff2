"""A Transformer language model with dropout, in the manner of Flax's lm1b example."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Global hyperparameters used to minimize obnoxious kwarg plumbing."""

    vocab_size: int
    emb_dim: int = 16
    num_heads: int = 2
    num_layers: int = 2
    mlp_dim: int = 24
    max_len: int = 16
    dropout_rate: float = 0.1
    logits_via_embedding: bool = True


class MlpBlock(nn.Module):
    """Transformer MLP / feed-forward block."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, deterministic=True):
        config = self.config
        x = nn.Dense(config.mlp_dim)(inputs)
        x = nn.relu(x)
        x = nn.Dropout(rate=config.dropout_rate)(x, deterministic=deterministic)
        output = nn.Dense(inputs.shape[-1])(x)
        return nn.Dropout(rate=config.dropout_rate)(output, deterministic=deterministic)


class DecoderBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, decoder_mask=None, deterministic=True):
        config = self.config
        assert inputs.ndim == 3
        x = nn.LayerNorm()(inputs)
        b, t, d = x.shape
        heads = config.num_heads
        qkv = nn.DenseGeneral((3, heads, d // heads), use_bias=False, name="qkv")(x)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(d // heads)
        if decoder_mask is not None:
            scores = jnp.where(decoder_mask, scores, -1e9)
        weights = nn.softmax(scores, axis=-1)
        x = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d)
        x = nn.Dense(d, use_bias=False, name="proj")(x)
        x = nn.Dropout(rate=config.dropout_rate)(x, deterministic=deterministic)
        x = x + inputs
        z = nn.LayerNorm()(x)
        z = MlpBlock(config=config)(z, deterministic=deterministic)
        return x + z


class TransformerLM(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, deterministic: bool = True):
        config = self.config
        embed = nn.Embed(config.vocab_size, config.emb_dim, name="embed")
        mask = nn.make_causal_mask(inputs)
        x = embed(inputs)
        pos = self.param(
            "pos_embedding",
            nn.initializers.normal(stddev=0.02),
            (1, config.max_len, config.emb_dim),
        )
        x = x + pos[:, : inputs.shape[1], :]
        x = nn.Dropout(rate=config.dropout_rate)(x, deterministic=deterministic)
        for lyr in range(config.num_layers):
            x = DecoderBlock(config=config, name=f"encoderdecoderblock_{lyr}")(
                x, decoder_mask=mask, deterministic=deterministic
            )
        x = nn.LayerNorm(name="encoderdecoder_norm")(x)
        if config.logits_via_embedding:
            return embed.attend(x) / jnp.sqrt(x.shape[-1])
        return nn.Dense(config.vocab_size, name="logitdense")(x)


def build():
    """Returns a small model with its variables, its inputs, and the keywords of its call."""
    module = TransformerLM(TransformerConfig(11))
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 11)
    variables = module.init(jax.random.key(0), tokens)
    return (module, variables), (tokens,), {"rngs": {"dropout": jax.random.key(2)}}
