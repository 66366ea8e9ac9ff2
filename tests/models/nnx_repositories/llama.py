"""A decoder with rotary positions and grouped keys, as ports of LLaMA to NNX write it."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 2
    num_embed: int = 32
    embed_dim: int = 16
    hidden_dim: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 4
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


def apply_rope(x, positions, head_dim, theta):
    """Rotates pairs of features; x is [B, T, N, H]."""
    fraction = 2 * jnp.arange(0, head_dim // 2) / head_dim
    timescale = theta**fraction
    sinusoid = positions[..., jnp.newaxis] / timescale
    sin, cos = jnp.sin(sinusoid)[..., None, :], jnp.cos(sinusoid)[..., None, :]
    first, second = jnp.split(x, 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x.dtype)


class RMSNorm(nnx.Module):
    def __init__(self, dim: int, eps: float, *, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.ones_init()(rngs.params(), (dim,)))
        self.eps = eps

    def __call__(self, x):
        dtype = x.dtype
        rms = jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True) + self.eps)
        return jnp.astype(self.w * x / rms, dtype)


class Attention(nnx.Module):
    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        init = nnx.initializers.normal(0.02)
        self.q = nnx.Param(init(rngs.params(), (cfg.embed_dim, cfg.num_heads, cfg.head_dim)))
        self.kv = nnx.Param(init(rngs.params(), (2, cfg.embed_dim, cfg.num_kv_heads, cfg.head_dim)))
        self.o = nnx.Param(init(rngs.params(), (cfg.num_heads, cfg.head_dim, cfg.embed_dim)))

    def __call__(self, x, positions, mask):
        cfg = self.cfg
        q = jnp.einsum("BTD,DNH->BTNH", x, self.q.value)
        k, v = jnp.einsum("BTD,CDKH->CBTKH", x, self.kv.value)
        q = apply_rope(q, positions, cfg.head_dim, cfg.rope_theta)
        k = apply_rope(k, positions, cfg.head_dim, cfg.rope_theta)
        groups = cfg.num_heads // cfg.num_kv_heads
        k = jnp.repeat(k, groups, axis=2)
        v = jnp.repeat(v, groups, axis=2)
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) * cfg.head_dim**-0.5
        scores = jnp.where(mask[:, None], scores, jnp.finfo(scores.dtype).min)
        probs = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        out = jnp.einsum("BNTS,BSNH->BTNH", probs, v)
        return jnp.einsum("BTNH,NHD->BTD", out, self.o.value)


class FeedForward(nnx.Module):
    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.gate = nnx.Linear(cfg.embed_dim, cfg.hidden_dim, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(cfg.embed_dim, cfg.hidden_dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(cfg.hidden_dim, cfg.embed_dim, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(cfg.embed_dim, cfg.norm_eps, rngs=rngs)
        self.attn = Attention(cfg, rngs=rngs)
        self.ffn_norm = RMSNorm(cfg.embed_dim, cfg.norm_eps, rngs=rngs)
        self.ffn = FeedForward(cfg, rngs=rngs)

    def __call__(self, x, positions, mask):
        x = x + self.attn(self.attn_norm(x), positions, mask)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nnx.Module):
    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nnx.Embed(cfg.num_embed, cfg.embed_dim, rngs=rngs)
        self.layers = nnx.List([Layer(cfg, rngs=rngs) for _ in range(cfg.num_layers)])
        self.norm = RMSNorm(cfg.embed_dim, cfg.norm_eps, rngs=rngs)

    def __call__(self, tokens, lengths=None):
        B, T = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
        mask = jnp.tril(jnp.ones((T, T), dtype=jnp.bool_))[None]
        if lengths is not None:
            mask = mask & (jnp.arange(T)[None, None, :] < lengths[:, None, None])
        x = self.embed(tokens) * jnp.sqrt(self.cfg.embed_dim)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.embed.attend(self.norm(x))


def build():
    """Returns a small model, its inputs, and the arguments of its class."""
    tokens = jax.random.randint(jax.random.key(1), (2, 5), 0, 32)
    config = ModelConfig()
    inputs = [(tokens, jnp.array([3, 5])), (tokens,)]
    return Transformer(config, rngs=nnx.Rngs(0)), inputs, ((config,), {})
