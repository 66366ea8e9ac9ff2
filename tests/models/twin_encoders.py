"""Encoders written twice: BERT, T5, Whisper and ViT of transformers, and twins of theirs."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx

from models.twin_decoders import attend


def bert() -> Any:
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=40,
        max_position_embeddings=16,
    )
    return transformers.BertModel(config, add_pooling_layer=False)


class BertLayer(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.attention = nnx.MultiHeadAttention(4, 32, rngs=rngs, decode=False)
        self.norm_1 = nnx.LayerNorm(32, epsilon=1e-12, rngs=rngs)
        self.expand = nnx.Linear(32, 64, rngs=rngs)
        self.contract = nnx.Linear(64, 32, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(32, epsilon=1e-12, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.norm_1(x + self.attention(x))
        return self.norm_2(x + self.contract(jax.nn.gelu(self.expand(x), approximate=False)))


class Bert(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.word_embed = nnx.Embed(40, 32, rngs=rngs)
        self.position_embed = nnx.Embed(16, 32, rngs=rngs)
        self.type_embed = nnx.Embed(2, 32, rngs=rngs)
        self.embed_norm = nnx.LayerNorm(32, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List([BertLayer(rngs) for _ in range(2)])

    def __call__(self, ids: Any) -> Any:
        x = self.word_embed(ids) + self.position_embed(jnp.arange(ids.shape[1]))
        x = self.embed_norm(x + self.type_embed(jnp.zeros_like(ids)))
        for layer in self.layers:
            x = layer(x)
        return x


def nnx_bert() -> Any:
    return nnx.eval_shape(lambda: Bert(nnx.Rngs(0)))


class LinenBertLayer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        b, t, d = x.shape
        q, k, v = (nn.Dense(d, name=n)(x).reshape(b, t, 4, 8) for n in ("query", "key", "value"))
        y = nn.Dense(d, name="dense")(attend(q, k, v, causal=False).reshape(b, t, d))
        x = nn.LayerNorm(1e-12, name="attention_LayerNorm")(x + y)
        h = nn.Dense(64, name="intermediate_dense")(x)
        y = nn.Dense(d, name="output_dense")(jax.nn.gelu(h, approximate=False))
        return nn.LayerNorm(1e-12, name="output_LayerNorm")(x + y)


class LinenBert(nn.Module):
    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(40, 32, name="word_embeddings")(ids)
        x = x + nn.Embed(16, 32, name="position_embeddings")(jnp.arange(ids.shape[1]))
        x = x + nn.Embed(2, 32, name="token_type_embeddings")(jnp.zeros_like(ids))
        x = nn.LayerNorm(1e-12, name="embeddings_LayerNorm")(x)
        for i in range(2):
            x = LinenBertLayer(name=f"layer_{i}")(x)
        return x


def linen_bert() -> Any:
    module = LinenBert()
    ids = jax.ShapeDtypeStruct((1, 6), jnp.int32)
    return module, jax.eval_shape(module.init, jax.random.key(0), ids)


def t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=40, dropout_rate=0
    )
    return transformers.T5EncoderModel(config)


def _bucket(distance: Any, buckets: int = 32, most: int = 128) -> Any:
    half = buckets // 2
    start, size = jnp.where(distance > 0, half, 0), jnp.abs(distance)
    exact = half // 2
    far = exact + jnp.log(jnp.maximum(size, 1) / exact) / jnp.log(most / exact) * (half - exact)
    return start + jnp.where(size < exact, size, jnp.minimum(far.astype(int), half - 1))


class T5Block(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.norm1 = nnx.RMSNorm(32, rngs=rngs)
        self.q = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(32, rngs=rngs)
        self.wi = nnx.Linear(32, 48, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(48, 32, use_bias=False, rngs=rngs)

    def __call__(self, x: Any, bias: Any) -> Any:
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).reshape(b, t, 4, 8) for f in (self.q, self.k, self.v))
        chances = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, -1)
        x = x + self.o(jnp.einsum("bhqk,bkhd->bqhd", chances, v).reshape(b, t, d))
        return x + self.wo(jax.nn.relu(self.wi(self.norm2(x))))


class T5Encoder(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.shared = nnx.Embed(40, 32, rngs=rngs)
        self.relative_bias = nnx.Embed(32, 4, rngs=rngs)
        self.blocks = nnx.List([T5Block(rngs) for _ in range(2)])
        self.final_norm = nnx.RMSNorm(32, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x, at = self.shared(ids), jnp.arange(ids.shape[1])
        bias = self.relative_bias(_bucket(at[None] - at[:, None])).transpose(2, 0, 1)[None]
        for block in self.blocks:
            x = block(x, bias)
        return self.final_norm(x)


def nnx_t5() -> Any:
    return nnx.eval_shape(lambda: T5Encoder(nnx.Rngs(0)))


class WhisperEncoder(torch.nn.Module):
    """The encoder of transformers' Whisper alone."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.WhisperConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=10,
            vocab_size=60,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        )
        self.encoder = transformers.WhisperModel(config).encoder

    def forward(self, mel: Any) -> Any:
        return self.encoder(mel).last_hidden_state


class AudioBlock(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.attn_ln = nnx.LayerNorm(32, epsilon=1e-5, rngs=rngs)
        self.query = nnx.Linear(32, 32, rngs=rngs)
        self.key = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(32, 32, rngs=rngs)
        self.out = nnx.Linear(32, 32, rngs=rngs)
        self.mlp_ln = nnx.LayerNorm(32, epsilon=1e-5, rngs=rngs)
        self.mlp_0 = nnx.Linear(32, 64, rngs=rngs)
        self.mlp_2 = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        b, t, d = x.shape
        h = self.attn_ln(x)
        q, k, v = (f(h).reshape(b, t, 4, 8) for f in (self.query, self.key, self.value))
        x = x + self.out(attend(q, k, v, causal=False).reshape(b, t, d))
        return x + self.mlp_2(jax.nn.gelu(self.mlp_0(self.mlp_ln(x)), approximate=False))


class AudioEncoder(nnx.Module):
    """With the names of the authors of Whisper."""

    def __init__(self, rngs: Any) -> None:
        self.conv1 = nnx.Conv(8, 32, (3,), padding=1, rngs=rngs)
        self.conv2 = nnx.Conv(32, 32, (3,), strides=2, padding=1, rngs=rngs)
        self.positional_embedding = nnx.Param(jnp.zeros((10, 32)))
        self.blocks = nnx.List([AudioBlock(rngs) for _ in range(2)])
        self.ln_post = nnx.LayerNorm(32, epsilon=1e-5, rngs=rngs)

    def __call__(self, mel: Any) -> Any:
        x = mel.transpose(0, 2, 1)
        x = jax.nn.gelu(self.conv1(x), approximate=False)
        x = jax.nn.gelu(self.conv2(x), approximate=False) + self.positional_embedding[...]
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


def audio_encoder() -> Any:
    return nnx.eval_shape(lambda: AudioEncoder(nnx.Rngs(0)))


class Vit(torch.nn.Module):
    """ViT of transformers, and what it gives for the class token."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
            num_labels=5,
        )
        self.model = transformers.ViTForImageClassification(config)

    def forward(self, images: Any) -> Any:
        return self.model(images).logits


class VitBlock(nnx.Module):
    def __init__(self, rngs: Any, fused: bool) -> None:
        self.fused = fused
        self.norm1 = nnx.LayerNorm(32, epsilon=1e-12, rngs=rngs)
        if fused:
            self.qkv = nnx.Linear(32, 96, rngs=rngs)
            self.proj = nnx.Linear(32, 32, rngs=rngs)
        else:
            self.attn = nnx.MultiHeadAttention(4, 32, rngs=rngs, decode=False)
        self.norm2 = nnx.LayerNorm(32, epsilon=1e-12, rngs=rngs)
        self.fc1 = nnx.Linear(32, 64, rngs=rngs)
        self.fc2 = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.norm1(x)
        if self.fused:
            b, t, _ = x.shape
            q, k, v = jnp.moveaxis(self.qkv(h).reshape(b, t, 3, 4, 8), 2, 0)
            x = x + self.proj(attend(q, k, v, causal=False).reshape(b, t, 32))
        else:
            x = x + self.attn(h)
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x)), approximate=False))


class NnxVit(nnx.Module):
    def __init__(self, rngs: Any, fused: bool) -> None:
        self.patch_embed = nnx.Conv(3, 32, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, 32)))
        self.pos_embed = nnx.Param(jnp.zeros((1, 5, 32)))
        self.blocks = nnx.List([VitBlock(rngs, fused) for _ in range(2)])
        self.norm = nnx.LayerNorm(32, epsilon=1e-12, rngs=rngs)
        self.head = nnx.Linear(32, 5, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = self.patch_embed(images.transpose(0, 2, 3, 1)).reshape(images.shape[0], 4, 32)
        first = jnp.broadcast_to(self.cls_token[...], (x.shape[0], 1, 32))
        x = jnp.concatenate([first, x], 1) + self.pos_embed[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def nnx_vit(fused: bool = False) -> Any:
    return nnx.eval_shape(lambda: NnxVit(nnx.Rngs(0), fused))


class EqxVitBlock(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        a, b, c = jax.random.split(key, 3)
        bias = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(4, 32, **bias, key=a)
        self.norm1, self.norm2 = (eqx.nn.LayerNorm(32, eps=1e-12) for _ in range(2))
        self.linear1 = eqx.nn.Linear(32, 64, key=b)
        self.linear2 = eqx.nn.Linear(64, 32, key=c)

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        h = jax.nn.gelu(jax.vmap(self.linear1)(jax.vmap(self.norm2)(x)), approximate=False)
        return x + jax.vmap(self.linear2)(h)


class EqxVit(eqx.Module):
    patch_embedding: eqx.nn.Conv2d
    cls_token: Any
    positional_embedding: Any
    blocks: list[EqxVitBlock]
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 4)
        self.patch_embedding = eqx.nn.Conv2d(3, 32, 4, 4, key=keys[0])
        self.cls_token = jnp.zeros((1, 32))
        self.positional_embedding = jnp.zeros((5, 32))
        self.blocks = [EqxVitBlock(one) for one in keys[1:3]]
        self.norm = eqx.nn.LayerNorm(32, eps=1e-12)
        self.mlp = eqx.nn.Linear(32, 5, key=keys[3])

    def __call__(self, images: Any) -> Any:
        return jax.vmap(self.one)(images)

    def one(self, image: Any) -> Any:
        x = self.patch_embedding(image).reshape(32, 4).T
        x = jnp.concatenate([self.cls_token, x]) + self.positional_embedding
        for block in self.blocks:
            x = block(x)
        return self.mlp(self.norm(x[0]))


def eqx_vit() -> Any:
    return eqx.filter_eval_shape(EqxVit, jax.random.key(0))
