"""Twins of equal shapes, whose names say nothing or the opposite of what is right."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch.nn import functional as F

from models.twin_decoders import attend


class Block(torch.nn.Module):
    """The first norm is before the mlp, by the order in which it is made."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.norm1 = torch.nn.LayerNorm(8)
        self.norm2 = torch.nn.LayerNorm(8)
        self.w1, self.w2, self.w3 = (linear(8, 8, bias=False) for _ in range(3))
        self.a, self.b, self.c, self.d = (linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        n, t, _ = x.shape
        h = self.norm2(x)
        q, k, v = (f(h).view(n, t, 2, 4).transpose(1, 2) for f in (self.a, self.b, self.c))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, 8)
        x = x + self.d(y)
        h = self.norm1(x)
        return x + self.w2(F.silu(self.w3(h)) * self.w1(h))


class Trap(torch.nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.parts = torch.nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, x: Any) -> Any:
        return self.parts(x)


class NnxBlock(nnx.Module):
    """The first norm is before the attention, and gate comes before up."""

    def __init__(self, rngs: Any) -> None:
        def linear() -> Any:
            return nnx.Linear(8, 8, use_bias=False, rngs=rngs)

        self.norm1 = nnx.LayerNorm(8, epsilon=1e-5, rngs=rngs)
        self.q, self.k, self.v, self.o = (linear() for _ in range(4))
        self.norm2 = nnx.LayerNorm(8, epsilon=1e-5, rngs=rngs)
        self.w1, self.w2, self.w3 = (linear() for _ in range(3))

    def __call__(self, x: Any) -> Any:
        n, t, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).reshape(n, t, 2, 4) for f in (self.q, self.k, self.v))
        x = x + self.o(attend(q, k, v, causal=False).reshape(n, t, 8))
        h = self.norm2(x)
        return x + self.w3(jax.nn.silu(self.w1(h)) * self.w2(h))


class NnxTrap(nnx.Module):
    def __init__(self, rngs: Any, layers: int = 3) -> None:
        self.parts = nnx.List([NnxBlock(rngs) for _ in range(layers)])

    def __call__(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


class Reversed(nnx.Module):
    """Equal layers, which are made in another order than they are called in."""

    def __init__(self, rngs: Any) -> None:
        self.z, self.y, self.x = (nnx.Linear(8, 8, rngs=rngs) for _ in range(3))

    def __call__(self, x: Any) -> Any:
        return self.z(jnp.tanh(self.y(jnp.tanh(self.x(x)))))


class Chain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Gated(torch.nn.Module):
    """Names that are used elsewhere for the other matrix."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.up_proj, self.gate_proj = (linear(8, 12, bias=False) for _ in range(2))
        self.down_proj = linear(12, 8, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))


class NnxGated(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.gate = nnx.Linear(8, 12, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(8, 12, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(12, 8, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.ln = torch.nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        h = self.ln(x)
        return x + self.attn(h, h, h, need_weights=False)[0]


class Towers(torch.nn.Module):
    """Two towers of equal shapes, which only their inputs tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.Sequential(SelfAttention(), SelfAttention())
        self.transformer = torch.nn.Sequential(SelfAttention(), SelfAttention())

    def forward(self, image: Any, text: Any) -> Any:
        return torch.cat([self.visual(image).mean(1), self.transformer(text).mean(1)], -1)


class NnxSelfAttention(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        linears = (nnx.Linear(8, 8, rngs=rngs) for _ in range(4))
        self.query, self.key, self.value, self.out = linears
        self.norm = nnx.LayerNorm(8, epsilon=1e-5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.norm(x)
        q, k, v = (f(h).reshape(*x.shape[:2], 2, 4) for f in (self.query, self.key, self.value))
        return x + self.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


class NnxTowers(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.image = nnx.Sequential(NnxSelfAttention(rngs), NnxSelfAttention(rngs))
        self.text = nnx.Sequential(NnxSelfAttention(rngs), NnxSelfAttention(rngs))

    def __call__(self, image: Any, text: Any) -> Any:
        return jnp.concatenate([self.image(image).mean(1), self.text(text).mean(1)], -1)
