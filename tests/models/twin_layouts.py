"""Twins that lay out their weights in ways of their own: experts, fused heads, gates, kernels."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch.nn import functional as F

from models.twin_decoders import attend


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (torch.nn.Linear(8, 12, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(12, 8, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(torch.nn.Module):
    """Experts as modules with numbers, all of which each token has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.experts = torch.nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Any) -> Any:
        shares = self.gate(x).softmax(-1)
        return sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class NnxExperts(nnx.Module):
    """The same, stacked, with gate and up in one array."""

    def __init__(self, rngs: Any) -> None:
        self.router = nnx.Linear(8, 4, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Param(jnp.zeros((4, 8, 24)))
        self.down = nnx.Param(jnp.zeros((4, 12, 8)))

    def __call__(self, x: Any) -> Any:
        shares = jax.nn.softmax(self.router(x), -1)
        gate, up = jnp.split(jnp.einsum("btd,edf->btef", x, self.gate_up[...]), 2, -1)
        y = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, self.down[...])
        return jnp.einsum("bte,bted->btd", shares, y)


class NeoX(torch.nn.Module):
    """Queries, keys and values of each head after each other."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = torch.nn.Linear(8, 24)
        self.dense = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        n, t, _ = x.shape
        q, k, v = self.query_key_value(x).view(n, t, 2, 12).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.dense(y.reshape(n, t, 8))


class NnxHeads(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.query, self.key, self.value, self.out = (nnx.Linear(8, 8, rngs=rngs) for _ in range(4))

    def __call__(self, x: Any) -> Any:
        n, t, _ = x.shape
        q, k, v = (f(x).reshape(n, t, 2, 4) for f in (self.query, self.key, self.value))
        return self.out(attend(q, k, v, causal=False).reshape(n, t, 8))


class Upsample(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up1 = torch.nn.ConvTranspose2d(3, 6, 2, 2)
        self.up2 = torch.nn.ConvTranspose2d(6, 6, 3, 2)

    def forward(self, x: Any) -> Any:
        return self.up2(torch.tanh(self.up1(x)))


class LinenUpsample(nn.Module):
    """Kernels are not flipped, unlike in torch."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x.transpose(0, 2, 3, 1)
        x = jnp.tanh(nn.ConvTranspose(6, (2, 2), (2, 2), padding="VALID", name="deconv_0")(x))
        x = nn.ConvTranspose(6, (3, 3), (2, 2), padding="VALID", name="deconv_1")(x)
        return x.transpose(0, 3, 1, 2)


def linen_upsample() -> Any:
    model = LinenUpsample()
    return model, model.init(jax.random.key(0), jnp.zeros((1, 3, 8, 8)))


class Grouped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = torch.nn.Conv2d(3, 8, 1)
        self.groups = torch.nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.depth = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Any) -> Any:
        return self.depth(torch.tanh(self.groups(torch.tanh(self.point(x)))))


class EqxGrouped(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    third: eqx.nn.Conv2d

    def __init__(self, key: Any) -> None:
        a, b, c = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(3, 8, 1, key=a)
        self.second = eqx.nn.Conv2d(8, 8, 3, padding=1, groups=4, key=b)
        self.third = eqx.nn.Conv2d(8, 8, 3, padding=1, groups=8, key=c)

    def __call__(self, x: Any) -> Any:
        return jax.vmap(lambda y: self.third(jnp.tanh(self.second(jnp.tanh(self.first(y))))))(x)


class NnxGrouped(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.a = nnx.Conv(3, 8, (1, 1), rngs=rngs)
        self.b = nnx.Conv(8, 8, (3, 3), feature_group_count=4, rngs=rngs)
        self.c = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = x.transpose(0, 2, 3, 1)
        return self.c(jnp.tanh(self.b(jnp.tanh(self.a(y))))).transpose(0, 3, 1, 2)


class Gates(torch.nn.Module):
    """An LSTM whose gates are in an order, by the places of torch's."""

    order = (0, 1, 2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTMCell(6, 8)

    def forward(self, x: Any) -> Any:
        h = c = torch.zeros(x.shape[0], 8)
        for step in x.unbind(1):
            inputs = F.linear(step, self.cell.weight_ih, self.cell.bias_ih)
            gates = inputs + F.linear(h, self.cell.weight_hh, self.cell.bias_hh)
            i, f, g, o = (gates.chunk(4, -1)[at] for at in self.order)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


class OtherGates(Gates):
    order = (1, 0, 3, 2)


class Neighbours(torch.nn.Module):
    """Rotary positions that turn neighbours; the names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a0, self.a1, self.a2, self.a3 = (torch.nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        n, t, _ = x.shape
        angles = torch.outer(torch.arange(t).float(), torch.tensor([1.0, 0.1]))[:, None]

        def rotate(y: Any) -> Any:
            a, b = y.view(n, t, 2, 2, 2).unbind(-1)
            parts = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
            return torch.stack(parts, -1).flatten(-2).transpose(1, 2)

        v = self.a2(x).view(n, t, 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(rotate(self.a0(x)), rotate(self.a1(x)), v)
        return self.a3(y.transpose(1, 2).reshape(n, t, 8))


class Halves(nnx.Module):
    """Rotary positions that turn halves of a head."""

    def __init__(self, rngs: Any) -> None:
        self.z3, self.z2, self.z1, self.z0 = (
            nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x: Any) -> Any:
        n, t, _ = x.shape
        angles = jnp.outer(jnp.arange(t), jnp.array([1.0, 0.1]))[:, None]

        def rotate(y: Any) -> Any:
            a, b = jnp.split(y.reshape(n, t, 2, 4), 2, -1)
            parts = (
                a * jnp.cos(angles) - b * jnp.sin(angles),
                a * jnp.sin(angles) + b * jnp.cos(angles),
            )
            return jnp.concatenate(parts, -1)

        v = self.z1(x).reshape(n, t, 2, 4)
        y = attend(rotate(self.z3(x)), rotate(self.z2(x)), v, causal=False)
        return self.z0(y.reshape(n, t, 8))


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(8, 12, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(12, 8, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class NnxGated(nnx.Module):
    """The same, with a stack of gate and up that is named for the gate alone."""

    def __init__(self, rngs: Any) -> None:
        self.gating_einsum = nnx.Param(jnp.zeros((2, 8, 12)))
        self.linear = nnx.Param(jnp.zeros((12, 8)))

    def __call__(self, x: Any) -> Any:
        gate, up = jnp.einsum("btd,kdf->kbtf", x, self.gating_einsum[...])
        return jax.nn.silu(gate) * up @ self.linear[...]
