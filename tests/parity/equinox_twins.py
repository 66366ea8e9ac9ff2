"""Twins in Equinox, for one example each, under `jax.vmap`."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn

HALF = jnp.bfloat16


def lowered(linear, x):
    """What a layer of half precision gives."""
    linear = jax.tree.map(lambda w: w.astype(HALF), linear)
    return linear(x.astype(HALF)).astype(x.dtype)


class MLP(eqx.Module):
    fc1: nn.Linear
    norm1: nn.LayerNorm
    fc2: nn.Linear
    norm2: nn.LayerNorm
    head: nn.Linear
    fault: str = eqx.field(static=True)

    def __init__(self, *, fault: str = "", key: Any):
        a, b, c = jax.random.split(key, 3)
        self.fc1 = nn.Linear(12, 32, key=a)
        self.norm1 = nn.LayerNorm(32)
        self.fc2 = nn.Linear(32, 32, key=b)
        self.norm2 = nn.LayerNorm(32, eps=1e-6 if fault == "eps" else 1e-5)
        self.head = nn.Linear(32, 5, key=c)
        self.fault = fault

    def __call__(self, x):
        return jax.vmap(self.single)(x)

    def single(self, x):
        first, second = self.norm1, self.norm2
        if self.fault == "swapped norms":
            first, second = second, first
        x = jax.nn.gelu(first(self.fc1(x)), approximate=False)
        y = lowered(self.fc2, x) if self.fault == "dtype" else self.fc2(x)
        if self.fault == "bias twice":
            y = y + self.fc2.bias
        return self.head(x + jax.nn.gelu(second(y), approximate=self.fault == "gelu"))


class GRU(eqx.Module):
    embed: nn.Embedding
    w_ih: jax.Array
    w_hh: jax.Array
    b_ih: jax.Array
    b_hh: jax.Array
    norm: nn.LayerNorm
    head: nn.Linear
    fault: str = eqx.field(static=True)

    def __init__(self, dim: int = 12, *, fault: str = "", key: Any):
        a, b = jax.random.split(key)
        self.embed = nn.Embedding(29, dim, key=a)
        self.w_ih, self.w_hh = jnp.zeros((2, 3 * dim, dim))
        self.b_ih, self.b_hh = jnp.zeros((2, 3 * dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 5, key=b)
        self.fault = fault

    def __call__(self, ids):
        return jax.vmap(self.single)(ids)

    def step(self, h, x):
        xr, xz, xn = jnp.split(self.w_ih @ x + self.b_ih, 3)
        hr, hz, hn = jnp.split(self.w_hh @ h + self.b_hh, 3)
        if self.fault == "bias twice":
            hn = hn + jnp.split(self.b_hh, 3)[2]
        n = jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
        h = n + jax.nn.sigmoid(xz + hz) * (h - n)
        return h, h

    def single(self, ids):
        start, x = jnp.zeros(self.b_ih.size // 3), jax.vmap(self.embed)(ids)
        _, x = jax.lax.scan(partial(GRU.step, self), start, x)
        x = x if self.fault == "norm missing" else jax.vmap(self.norm)(x)
        head = (lambda v: lowered(self.head, v)) if self.fault == "dtype" else self.head
        return jax.vmap(head)(x)


class VAE(eqx.Module):
    enc: nn.Linear
    mu: nn.Linear
    logvar: nn.Linear
    dec1: nn.Linear
    dec2: nn.Linear
    fault: str = eqx.field(static=True)

    def __init__(self, dim: int = 12, latent: int = 4, *, fault: str = "", key: Any):
        a, b, c, d, e = jax.random.split(key, 5)
        self.enc = nn.Linear(dim, 16, key=a)
        self.mu, self.logvar = nn.Linear(16, latent, key=b), nn.Linear(16, latent, key=c)
        self.dec1, self.dec2 = nn.Linear(latent, 16, key=d), nn.Linear(16, dim, key=e)
        self.fault = fault

    def __call__(self, x, noise):
        h = jax.nn.relu(jax.vmap(self.enc)(x))
        mu, logvar = jax.vmap(self.mu)(h), jax.vmap(self.logvar)(h)
        if self.fault == "stop-gradient":  # one too many
            mu = jax.lax.stop_gradient(mu)
        z = mu + noise * jnp.exp(logvar if self.fault == "scale" else 0.5 * logvar)
        dec1 = (lambda v: lowered(self.dec1, v)) if self.fault == "dtype" else self.dec1
        y = jax.vmap(self.dec2)(jax.nn.relu(jax.vmap(dec1)(z)))
        divergence = -0.5 * (1 + logvar - mu**2 - jnp.exp(logvar)).sum(-1).mean()
        return jax.nn.sigmoid(y), divergence


class WaveNet(eqx.Module):
    stem: nn.Conv1d
    filters: list[nn.Conv1d]
    gates: list[nn.Conv1d]
    last: nn.Conv1d
    fault: str = eqx.field(static=True)

    def __init__(self, width: int = 8, *, fault: str = "", key: Any):
        keys = iter(jax.random.split(key, 8))
        self.stem = nn.Conv1d(1, width, 1, key=next(keys))
        self.filters = [nn.Conv1d(width, width, 2, dilation=2**i, key=next(keys)) for i in range(3)]
        self.gates = [nn.Conv1d(width, width, 2, dilation=2**i, key=next(keys)) for i in range(3)]
        self.last = nn.Conv1d(width, 4, 1, key=next(keys))
        self.fault = fault

    def __call__(self, x):
        return jax.vmap(self.single)(x)

    def single(self, x):
        x = self.stem(x)
        for i, (filter_, gate) in enumerate(zip(self.filters, self.gates, strict=True)):
            ahead = int(self.fault == "mask" and i == 1)  # sees what comes next
            y = jnp.pad(x, ((0, 0), (2**i - ahead, ahead)))
            y = jnp.tanh(filter_(y)) * jax.nn.sigmoid(gate(y))
            if self.fault == "bias twice" and i == 2:
                y = y + filter_.bias
            x = x + y
        return self.last(jax.nn.relu(x))


class Mixer(eqx.Module):
    """Of the model in NNX."""

    patch: nn.Conv2d
    blocks: list[dict[str, Any]]
    norm: nn.LayerNorm
    head: nn.Linear
    fault: str = eqx.field(static=True)

    def __init__(self, dim: int = 12, tokens: int = 4, *, fault: str = "", key: Any):
        keys = iter(jax.random.split(key, 20))
        self.patch = nn.Conv2d(3, dim, 4, 4, key=next(keys))
        self.blocks = [
            {
                "norm1": nn.LayerNorm(dim),
                "tokens": self.mlp(tokens, keys),
                "norm2": nn.LayerNorm(dim, eps=1e-6 if fault == "eps" and i else 1e-5),
                "channels": self.mlp(dim, keys),
            }
            for i in range(2)
        ]
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 5, key=next(keys))
        self.fault = fault

    @staticmethod
    def mlp(size, keys):
        first = nn.Linear(size, 2 * size, key=next(keys))
        return {"fc1": first, "fc2": nn.Linear(2 * size, size, key=next(keys))}

    def __call__(self, x):
        return jax.vmap(self.single)(x)

    def single(self, x):
        x = self.patch(x).reshape(len(self.patch.bias), -1).T
        for i, block in enumerate(self.blocks):
            fault = self.fault if i else ""
            first, second = block["norm1"], block["norm2"]
            if fault == "swapped norms":
                first, second = second, first
            x = x + self.feed(block["tokens"], jax.vmap(first)(x).T, "").T
            x = x + self.feed(block["channels"], jax.vmap(second)(x), fault)
        return self.head(jax.vmap(self.norm)(x).mean(0))

    @staticmethod
    def feed(mlp, x, fault):
        y = jax.nn.gelu(jax.vmap(mlp["fc1"])(x), approximate=fault == "gelu")
        return jax.vmap(mlp["fc2"])(y)


class Finetune(eqx.Module):
    """Gradients end before the head: where users of Equinox would also filter."""

    fc1: nn.Linear
    fc2: nn.Linear
    norm: nn.LayerNorm
    head: nn.Linear
    fault: str = eqx.field(static=True)

    def __init__(self, dim: int = 16, *, fault: str = "", key: Any):
        a, b, c = jax.random.split(key, 3)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim, key=a), nn.Linear(2 * dim, dim, key=b)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5, key=c)
        self.fault = fault

    def __call__(self, x):
        return jax.vmap(self.single)(x)

    def single(self, x):
        y = self.fc2(jax.nn.gelu(self.fc1(x), approximate=self.fault == "gelu"))
        if self.fault != "frozen":
            y = jax.lax.stop_gradient(y)
        return self.head(self.norm(x + y))
