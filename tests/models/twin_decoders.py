"""Decoders written twice: transformers' classes, and those that others would write."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx
from torch.nn import functional as F

IDS = torch.tensor([[5, 9, 2, 31, 7, 0]])


def attend(q: Any, k: Any, v: Any, *, causal: bool = True, scale: float | None = None) -> Any:
    """Attention of arrays of shape (batch, positions, heads, width)."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def rotate(x: Any, theta: float = 10000.0) -> Any:
    """Rotary positions of halves, on (batch, positions, heads, width)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama(**more: Any) -> Any:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        "rms_norm_eps": 1e-5,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **more}))


# Llama in NNX, with names of its own


class Attention(nnx.Module):
    def __init__(self, d: int, heads: int, groups: int, rngs: Any) -> None:
        w = d // heads
        self.heads, self.groups, self.w = heads, groups, w
        self.query = nnx.Linear(d, heads * w, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(d, groups * w, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(d, groups * w, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(heads * w, d, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        b, t, _ = x.shape
        q = rotate(self.query(x).reshape(b, t, self.heads, self.w))
        k = rotate(self.key(x).reshape(b, t, self.groups, self.w))
        v = self.value(x).reshape(b, t, self.groups, self.w)
        return self.out(attend(q, k, v).reshape(b, t, -1))


class HeadsAttention(nnx.Module):
    """With the heads as dimensions of the kernels."""

    def __init__(self, d: int, heads: int, groups: int, rngs: Any) -> None:
        w = d // heads
        self.q = nnx.LinearGeneral(d, (heads, w), use_bias=False, rngs=rngs)
        self.k = nnx.LinearGeneral(d, (groups, w), use_bias=False, rngs=rngs)
        self.v = nnx.LinearGeneral(d, (groups, w), use_bias=False, rngs=rngs)
        self.o = nnx.LinearGeneral((heads, w), d, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.o(attend(rotate(self.q(x)), rotate(self.k(x)), self.v(x)))


class FusedAttention(nnx.Module):
    def __init__(self, d: int, heads: int, groups: int, rngs: Any) -> None:
        w = d // heads
        self.sizes = heads, groups, w
        self.qkv = nnx.Linear(d, (heads + 2 * groups) * w, use_bias=False, rngs=rngs)
        self.proj = nnx.Linear(heads * w, d, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        (heads, groups, w), (b, t, _) = self.sizes, x.shape
        q, k, v = jnp.split(self.qkv(x), [heads * w, (heads + groups) * w], -1)
        q, k = q.reshape(b, t, heads, w), k.reshape(b, t, groups, w)
        y = attend(rotate(q), rotate(k), v.reshape(b, t, groups, w))
        return self.proj(y.reshape(b, t, -1))


class GatedMlp(nnx.Module):
    def __init__(self, d: int, wide: int, rngs: Any) -> None:
        self.gate = nnx.Linear(d, wide, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(d, wide, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(wide, d, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class FusedMlp(nnx.Module):
    def __init__(self, d: int, wide: int, rngs: Any) -> None:
        self.wi = nnx.Linear(d, 2 * wide, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(wide, d, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        gate, up = jnp.split(self.wi(x), 2, -1)
        return self.wo(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    def __init__(self, d: int, wide: int, attention: Any, mlp: Any, rngs: Any) -> None:
        self.attn_norm = nnx.RMSNorm(d, epsilon=1e-5, rngs=rngs)
        self.attn = attention(d, 4, 2, rngs)
        self.mlp_norm = nnx.RMSNorm(d, epsilon=1e-5, rngs=rngs)
        self.mlp = mlp(d, wide, rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    def __init__(
        self,
        rngs: Any,
        attention: Any = Attention,
        mlp: Any = GatedMlp,
        wide: int = 48,
        layers: int = 2,
    ) -> None:
        self.embed = nnx.Embed(40, 32, rngs=rngs)
        self.blocks = nnx.List([Block(32, wide, attention, mlp, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(32, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(32, 40, use_bias=False, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(*args: Any, **kwargs: Any) -> Any:
    return nnx.eval_shape(lambda: Decoder(nnx.Rngs(0), *args, **kwargs))


class TiedDecoder(Decoder):
    def __init__(self, rngs: Any) -> None:
        super().__init__(rngs)
        del self.head

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def tied_decoder() -> Any:
    return nnx.eval_shape(lambda: TiedDecoder(nnx.Rngs(0)))


# the same in Linen, with layers stacked for a scan


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        d = x.shape[-1]
        h = nn.RMSNorm(epsilon=1e-5, name="pre_attention_norm")(x)
        q = nn.DenseGeneral((4, 8), use_bias=False, name="query")(h)
        k = nn.DenseGeneral((2, 8), use_bias=False, name="key")(h)
        v = nn.DenseGeneral((2, 8), use_bias=False, name="value")(h)
        y = attend(rotate(q), rotate(k), v)
        x = x + nn.DenseGeneral(d, axis=(-2, -1), use_bias=False, name="out")(y)
        h = nn.RMSNorm(epsilon=1e-5, name="pre_ffw_norm")(x)
        gate = nn.Dense(48, use_bias=False, name="wi_0")(h)
        up = nn.Dense(48, use_bias=False, name="wi_1")(h)
        return x + nn.Dense(d, use_bias=False, name="wo")(jax.nn.silu(gate) * up), None


class LinenDecoder(nn.Module):
    scanned: bool = True

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(40, 32, name="token_embedder")(ids)
        if self.scanned:
            stack = nn.scan(
                LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = stack(name="layers")(x, None)
        else:
            for i in range(2):
                x, _ = LinenBlock(name=f"layers_{i}")(x)
        x = nn.RMSNorm(epsilon=1e-5, name="decoder_norm")(x)
        return nn.Dense(40, use_bias=False, name="logits_dense")(x)


def linen_decoder(scanned: bool = True) -> Any:
    module = LinenDecoder(scanned)
    ids = jax.ShapeDtypeStruct((1, 6), jnp.int32)
    return module, jax.eval_shape(module.init, jax.random.key(0), ids)


# the same in Equinox


class EqxBlock(eqx.Module):
    ln_1: eqx.nn.RMSNorm
    wq: eqx.nn.Linear
    wk: eqx.nn.Linear
    wv: eqx.nn.Linear
    wo: eqx.nn.Linear
    ln_2: eqx.nn.RMSNorm
    w_gate: eqx.nn.Linear
    w_up: eqx.nn.Linear
    w_down: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = iter(jax.random.split(key, 7))
        self.ln_1 = eqx.nn.RMSNorm(32, eps=1e-5, use_bias=False)
        self.ln_2 = eqx.nn.RMSNorm(32, eps=1e-5, use_bias=False)
        self.wq, self.wo = (eqx.nn.Linear(32, 32, False, key=next(keys)) for _ in range(2))
        self.wk, self.wv = (eqx.nn.Linear(32, 16, False, key=next(keys)) for _ in range(2))
        self.w_gate, self.w_up = (eqx.nn.Linear(32, 48, False, key=next(keys)) for _ in range(2))
        self.w_down = eqx.nn.Linear(48, 32, False, key=next(keys))

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.ln_1)(x)
        q = jax.vmap(self.wq)(h).reshape(1, -1, 4, 8)
        k = jax.vmap(self.wk)(h).reshape(1, -1, 2, 8)
        v = jax.vmap(self.wv)(h).reshape(1, -1, 2, 8)
        x = x + jax.vmap(self.wo)(attend(rotate(q), rotate(k), v).reshape(-1, 32))
        h = jax.vmap(self.ln_2)(x)
        gate, up = jax.vmap(self.w_gate)(h), jax.vmap(self.w_up)(h)
        return x + jax.vmap(self.w_down)(jax.nn.silu(gate) * up)


class EqxDecoder(eqx.Module):
    wte: eqx.nn.Embedding
    layers: list[EqxBlock]
    ln_f: eqx.nn.RMSNorm
    lm_head: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = iter(jax.random.split(key, 4))
        self.wte = eqx.nn.Embedding(40, 32, key=next(keys))
        self.layers = [EqxBlock(next(keys)) for _ in range(2)]
        self.ln_f = eqx.nn.RMSNorm(32, eps=1e-5, use_bias=False)
        self.lm_head = eqx.nn.Linear(32, 40, False, key=next(keys))

    def __call__(self, ids: Any) -> Any:
        x = jax.vmap(self.wte)(ids[0])
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.lm_head)(jax.vmap(self.ln_f)(x))[None]


def eqx_decoder() -> Any:
    return eqx.filter_eval_shape(EqxDecoder, jax.random.key(0))


# Llama as its authors released it: rotary pairs side by side


class OriginalBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.attention = torch.nn.ModuleDict(
            {
                "wq": linear(32, 32, bias=False),
                "wk": linear(32, 16, bias=False),
                "wv": linear(32, 16, bias=False),
                "wo": linear(32, 32, bias=False),
            }
        )
        self.feed_forward = torch.nn.ModuleDict(
            {
                "w1": linear(32, 48, bias=False),
                "w2": linear(48, 32, bias=False),
                "w3": linear(32, 48, bias=False),
            }
        )
        self.attention_norm = torch.nn.RMSNorm(32, eps=1e-5)
        self.ffn_norm = torch.nn.RMSNorm(32, eps=1e-5)

    def rotate(self, x: Any) -> Any:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        half = pairs.shape[-1]
        angles = torch.arange(x.shape[1])[:, None] / 10000.0 ** (torch.arange(half) / half)
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    def forward(self, x: Any) -> Any:
        (b, t, _), a, f = x.shape, self.attention, self.feed_forward
        h = self.attention_norm(x)
        q = self.rotate(a["wq"](h).view(b, t, 4, 8)).transpose(1, 2)
        k = self.rotate(a["wk"](h).view(b, t, 2, 8)).transpose(1, 2).repeat_interleave(2, 1)
        v = a["wv"](h).view(b, t, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a["wo"](y.transpose(1, 2).reshape(b, t, 32))
        h = self.ffn_norm(x)
        return x + f["w2"](F.silu(f["w1"](h)) * f["w3"](h))


class Original(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(40, 32)
        self.layers = torch.nn.ModuleList(OriginalBlock() for _ in range(2))
        self.norm = torch.nn.RMSNorm(32, eps=1e-5)
        self.output = torch.nn.Linear(32, 40, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


# Mixtral in NNX: experts in one array


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=40,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )
    return transformers.MixtralForCausalLM(config)


class Experts(nnx.Module):
    def __init__(self, d: int, wide: int, rngs: Any) -> None:
        normal = nnx.initializers.normal(0.02)
        self.router = nnx.Linear(d, 4, use_bias=False, rngs=rngs)
        self.w_gate = nnx.Param(normal(rngs.params(), (4, d, wide)))
        self.w_up = nnx.Param(normal(rngs.params(), (4, d, wide)))
        self.w_down = nnx.Param(normal(rngs.params(), (4, wide, d)))

    def __call__(self, x: Any) -> Any:
        chances = jax.nn.softmax(self.router(x), -1)
        best, which = jax.lax.top_k(chances, 2)
        best = best / best.sum(-1, keepdims=True)
        weights = (jax.nn.one_hot(which, 4) * best[..., None]).sum(-2)
        gate = jnp.einsum("btd,edw->btew", x, self.w_gate[...])
        up = jnp.einsum("btd,edw->btew", x, self.w_up[...])
        y = jnp.einsum("btew,ewd->bted", jax.nn.silu(gate) * up, self.w_down[...])
        return (y * weights[..., None]).sum(-2)


def moe_decoder() -> Any:
    return decoder(Attention, Experts, 24)


# GPT-2


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=16, attn_pdrop=0, resid_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


class NanoBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = torch.nn.LayerNorm(32)
        self.attn = torch.nn.Module()
        self.attn.c_attn = torch.nn.Linear(32, 96)
        self.attn.c_proj = torch.nn.Linear(32, 32)
        self.ln_2 = torch.nn.LayerNorm(32)
        self.mlp = torch.nn.Module()
        self.mlp.c_fc = torch.nn.Linear(32, 128)
        self.mlp.c_proj = torch.nn.Linear(128, 32)

    def forward(self, x: Any) -> Any:
        b, t, _ = x.shape
        parts = self.attn.c_attn(self.ln_1(x)).split(32, 2)
        q, k, v = (part.view(b, t, 4, 8).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.attn.c_proj(y.reshape(b, t, 32))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class NanoGpt(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.ModuleDict(
            {
                "wte": torch.nn.Embedding(40, 32),
                "wpe": torch.nn.Embedding(16, 32),
                "h": torch.nn.ModuleList(NanoBlock() for _ in range(2)),
                "ln_f": torch.nn.LayerNorm(32),
            }
        )
        self.lm_head = torch.nn.Linear(32, 40, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Any) -> Any:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


class GptBlock(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.ln1 = nnx.LayerNorm(32, epsilon=1e-5, rngs=rngs)
        self.q_proj = nnx.Linear(32, 32, rngs=rngs)
        self.k_proj = nnx.Linear(32, 32, rngs=rngs)
        self.v_proj = nnx.Linear(32, 32, rngs=rngs)
        self.out_proj = nnx.Linear(32, 32, rngs=rngs)
        self.ln2 = nnx.LayerNorm(32, epsilon=1e-5, rngs=rngs)
        self.fc1 = nnx.Linear(32, 128, rngs=rngs)
        self.fc2 = nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        b, t, _ = x.shape
        h = self.ln1(x)
        q, k, v = (f(h).reshape(b, t, 4, 8) for f in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.out_proj(attend(q, k, v).reshape(b, t, 32))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.ln2(x)), approximate=True))


class Gpt(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.tok = nnx.Embed(40, 32, rngs=rngs)
        self.pos = nnx.Embed(16, 32, rngs=rngs)
        self.layers = nnx.List([GptBlock(rngs) for _ in range(2)])
        self.ln_f = nnx.LayerNorm(32, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.tok(ids) + self.pos(jnp.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.tok.attend(self.ln_f(x))


def gpt() -> Any:
    return nnx.eval_shape(lambda: Gpt(nnx.Rngs(0)))
