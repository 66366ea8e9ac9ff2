"""A GPT as ports of nanoGPT to NNX write it."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in linear layers and norms, as GPT-2


class CausalSelfAttention(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        assert config.n_embd % config.n_head == 0
        # key, query, value projections for all heads, but in a batch
        self.c_attn = nnx.Linear(
            config.n_embd, 3 * config.n_embd, use_bias=config.bias,
            kernel_init=nnx.initializers.normal(stddev=0.02), rngs=rngs,
        )  # fmt: skip
        # output projection
        self.c_proj = nnx.Linear(
            config.n_embd, config.n_embd, use_bias=config.bias,
            kernel_init=nnx.initializers.normal(stddev=0.02 / math.sqrt(2 * config.n_layer)),
            rngs=rngs,
        )  # fmt: skip
        # regularization
        self.attn_dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.resid_dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.n_head = config.n_head
        self.n_embd = config.n_embd

    def __call__(self, x: jax.Array) -> jax.Array:
        B, T, C = x.shape  # batch size, sequence length, embedding dimensionality (n_embd)

        q, k, v = jnp.split(self.c_attn(x), 3, axis=-1)
        q = q.reshape(B, T, self.n_head, C // self.n_head).transpose(0, 2, 1, 3)  # (B, nh, T, hs)
        k = k.reshape(B, T, self.n_head, C // self.n_head).transpose(0, 2, 1, 3)  # (B, nh, T, hs)
        v = v.reshape(B, T, self.n_head, C // self.n_head).transpose(0, 2, 1, 3)  # (B, nh, T, hs)

        # causal self-attention: (B, nh, T, hs) x (B, nh, hs, T) -> (B, nh, T, T)
        att = (q @ k.swapaxes(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        mask = jnp.tril(jnp.ones((T, T), dtype=bool))
        att = jnp.where(mask, att, -jnp.inf)
        att = jax.nn.softmax(att, axis=-1)
        att = self.attn_dropout(att)
        y = att @ v  # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(0, 2, 1, 3).reshape(B, T, C)  # all head outputs side by side

        # output projection
        return self.resid_dropout(self.c_proj(y))


class MLP(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.c_fc = nnx.Linear(config.n_embd, 4 * config.n_embd, use_bias=config.bias, rngs=rngs)
        self.c_proj = nnx.Linear(4 * config.n_embd, config.n_embd, use_bias=config.bias, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x):
        x = self.c_fc(x)
        x = nnx.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Block(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.ln_1 = nnx.LayerNorm(config.n_embd, epsilon=1e-5, use_bias=config.bias, rngs=rngs)
        self.attn = CausalSelfAttention(config, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(config.n_embd, epsilon=1e-5, use_bias=config.bias, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nnx.Module):
    """The language model; the token embedding is the head, too."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = nnx.Embed(config.vocab_size, config.n_embd, rngs=rngs)
        self.wpe = nnx.Embed(config.block_size, config.n_embd, rngs=rngs)
        self.drop = nnx.Dropout(config.dropout, rngs=rngs)
        self.h = nnx.List([Block(config, rngs=rngs) for _ in range(config.n_layer)])
        self.ln_f = nnx.LayerNorm(config.n_embd, epsilon=1e-5, use_bias=config.bias, rngs=rngs)

    def __call__(self, idx: jax.Array) -> jax.Array:
        _, t = idx.shape
        if t > self.config.block_size:
            raise ValueError(f"Cannot forward sequence of length {t}")
        pos = jnp.arange(0, t)  # shape (t)

        # forward the GPT model itself
        tok_emb = self.wte(idx)  # token embeddings of shape (b, t, n_embd)
        pos_emb = self.wpe(pos)  # position embeddings of shape (t, n_embd)
        x = self.drop(tok_emb + pos_emb)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        return self.wte.attend(x)


def build():
    """Returns a small model, its inputs, and the arguments of its class."""
    config = GPTConfig(block_size=16, vocab_size=40, n_layer=2, n_head=2, n_embd=8, dropout=0.1)
    idx = jax.random.randint(jax.random.key(1), (2, 6), 0, 40)
    return GPT(config, rngs=nnx.Rngs(0)), (idx,), ((config,), {})
