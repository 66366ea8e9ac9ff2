"""Twins in Flax Linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

HALF = jnp.bfloat16


class MLP(nn.Module):
    dropout: float = 0.0
    fault: str = ""

    @nn.compact
    def __call__(self, x, train: bool = False):
        names = ("norm2", "norm1") if self.fault == "swapped norms" else ("norm1", "norm2")
        x = nn.LayerNorm(epsilon=1e-5, name=names[0])(nn.Dense(32, name="fc1")(x))
        x = nn.gelu(x, approximate=False)
        if self.fault == "dropout in eval":
            x = nn.Dropout(self.dropout, deterministic=False)(x, rng=jax.random.key(0))
        else:
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        y = nn.Dense(32, dtype=HALF if self.fault == "dtype" else None, name="fc2")(x)
        eps = 1e-6 if self.fault == "eps" else 1e-5
        y = nn.LayerNorm(epsilon=eps, name=names[1])(y.astype(x.dtype))
        x = x + nn.gelu(y, approximate=self.fault == "gelu")
        return nn.Dense(5, name="head")(x)


class BatchNorm(nn.Module):
    """As in PyTorch, whose running variance is that of a sample: Linen's own is biased."""

    train: bool
    momentum: float = 0.9
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x):
        size, keep = x.shape[-1:], self.momentum
        scale = self.param("scale", nn.initializers.ones, size)
        bias = self.param("bias", nn.initializers.zeros, size)
        mean = self.variable("batch_stats", "mean", jnp.zeros, size)
        var = self.variable("batch_stats", "var", jnp.ones, size)
        use = mean.value, var.value
        if self.train:
            use, count = (x.mean((0, 1, 2)), x.var((0, 1, 2))), x[..., 0].size
            if not self.is_initializing():
                mean.value = keep * mean.value + (1 - keep) * use[0]
                var.value = keep * var.value + (1 - keep) * use[1] * count / (count - 1)
        return (x - use[0]) * jax.lax.rsqrt(use[1] + self.epsilon) * scale + bias


class ConvNet(nn.Module):
    width: int = 8
    fault: str = ""

    @nn.compact
    def __call__(self, x, train: bool = False):
        names = ("bn2", "bn1") if self.fault == "swapped norms" else ("bn1", "bn2")
        momentum = 0.1 if self.fault == "momentum" else 0.9
        eps = 1e-3 if self.fault == "eps" else 1e-5  # that of Keras
        x = nn.Conv(self.width, (3, 3), name="conv1")(x.transpose(0, 2, 3, 1))
        x = BatchNorm(train, name=names[0])(x)
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.Conv(self.width, (3, 3), use_bias=False, name="conv2")(x)
        if self.fault == "variance":
            norm = nn.BatchNorm(not train, momentum=momentum, epsilon=eps, name=names[1])
        else:
            norm = BatchNorm(train, momentum, eps, name=names[1])
        x = nn.relu(norm(x))
        return nn.Dense(5, name="fc")(x.mean((1, 2)))


class Block(nn.Module):
    heads: int
    eps: float
    approximate: bool
    dtype: Any = None
    fault: str = ""

    @nn.compact
    def __call__(self, x, mask=None):
        kinds = {"dtype": self.dtype, "param_dtype": self.dtype or jnp.float32}
        names = ("norm2", "norm1") if self.fault == "swapped norms" else ("norm1", "norm2")
        dim = x.shape[-1]
        y = nn.LayerNorm(epsilon=self.eps, name=names[0], **kinds)(x)
        q, k, v = (
            nn.Dense(dim, name=f"attn_{name}", **kinds)(y).reshape(
                *y.shape[:-1], self.heads, dim // self.heads
            )
            for name in "qkv"
        )
        if self.fault == "scale":
            q = q * (dim // self.heads) ** 0.5
        y = nn.dot_product_attention(q, k, v, mask=mask, force_fp32_for_softmax=True)
        x = x + nn.Dense(dim, name="attn_o", **kinds)(y.reshape(x.shape))
        eps = 1e-3 if self.fault == "eps" else self.eps
        y = nn.LayerNorm(epsilon=eps, name=names[1], **kinds)(x)
        y = nn.Dense(2 * dim, name="mlp_fc1", **kinds)(y)
        y = nn.gelu(y, approximate=self.approximate != (self.fault == "gelu"))
        if self.fault == "dtype":
            kinds["dtype"] = HALF
        return x + nn.Dense(dim, name="mlp_fc2", **kinds)(y).astype(x.dtype)


class ViT(nn.Module):
    dim: int = 16
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.dim, (4, 4), 4, name="patch")(x.transpose(0, 2, 3, 1))
        x = x.reshape(len(x), -1, self.dim)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, self.dim))
        x = jnp.concatenate((jnp.tile(cls, (len(x), 1, 1)), x), 1)
        x = x + self.param("pos", nn.initializers.zeros, (1, 5, self.dim))
        for i in range(2):
            x = Block(2, 1e-6, False, fault=self.fault * i, name=f"blocks_{i}")(x)
        return nn.Dense(5, name="head")(nn.LayerNorm(name="norm")(x)[:, 0])


class GPT(nn.Module):
    dtype: Any = None
    fault: str = ""

    @nn.compact
    def __call__(self, ids):
        kinds = {"dtype": self.dtype, "param_dtype": self.dtype or jnp.float32}
        wte = nn.Embed(29, 16, name="wte", **kinds)
        x = wte(ids) + nn.Embed(16, 16, name="wpe", **kinds)(jnp.arange(ids.shape[1]))
        mask = jnp.tri(ids.shape[1], k=-int(self.fault == "mask"), dtype=bool)
        mask = mask | jnp.eye(ids.shape[1], dtype=bool)[:1]  # the first token sees itself
        for i in range(2):
            x = Block(2, 1e-5, True, self.dtype, self.fault * i, name=f"h_{i}")(x, mask)
        return wte.attend(nn.LayerNorm(epsilon=1e-5, name="ln_f", **kinds)(x))


class ActorCritic(nn.Module):
    dim: int = 16
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(self.dim, name="fc1")(x))
        x = nn.Dense(self.dim, dtype=HALF if self.fault == "dtype" else None, name="fc2")(x)
        x = jnp.tanh(x.astype(jnp.float32))
        log_std = self.param("log_std", nn.initializers.zeros, (2,))
        features = x if self.fault == "stop-gradient" else jax.lax.stop_gradient(x)
        value = nn.Dense(1, name="value2")(jnp.tanh(nn.Dense(self.dim, name="value1")(features)))
        mean = nn.Dense(2, name="mean")(x)
        if self.fault == "frozen":
            log_std = jax.lax.stop_gradient(log_std)
        return mean, log_std if self.fault == "scale" else jnp.exp(log_std), value[..., 0]
