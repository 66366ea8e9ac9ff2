"""Twins in Flax NNX; `fault` makes one of the mistakes that people make in such a port."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

HALF = jnp.bfloat16


def at(fault: str, *here: str) -> str:
    """The fault if it belongs here."""
    return fault if fault in here else ""


def gelu(x: Any, approximate: bool, fault: str) -> Any:
    return nnx.gelu(x, approximate=approximate != (fault == "gelu"))


class MLP(nnx.Module):
    def __init__(
        self,
        sizes: Any = (12, 32, 32, 5),
        dropout: float = 0.0,
        *,
        dtype: Any = jnp.float32,
        fault: str = "",
        rngs: nnx.Rngs,
    ):
        kinds = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        low = {**kinds, "dtype": HALF} if fault == "dtype" else kinds
        eps = 1e-6 if fault == "eps" else 1e-5
        self.fc1 = nnx.Linear(sizes[0], sizes[1], **kinds)
        self.norm1 = nnx.LayerNorm(sizes[1], epsilon=1e-5, **kinds)
        self.fc2 = nnx.Linear(sizes[1], sizes[2], **low)
        self.norm2 = nnx.LayerNorm(sizes[2], epsilon=eps, **kinds)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(sizes[2], sizes[3], **kinds)
        self.fault = fault

    def __call__(self, x):
        first, second = self.norm1, self.norm2
        if self.fault == "swapped norms":
            first, second = second, first
        x = nnx.gelu(first(self.fc1(x)), approximate=False)
        deterministic = False if self.fault == "dropout in eval" else None
        if self.fault != "dropout missing":
            x = self.dropout(x, deterministic=deterministic)
        y = self.fc2(x).astype(x.dtype)
        if self.fault == "bias twice":
            y = y + self.fc2.bias[...]
        x = x + gelu(second(y), False, self.fault)
        return self.head(x)


class BatchNorm(nnx.Module):
    """As in PyTorch, whose running variance is that of a sample: Flax's own is biased."""

    def __init__(self, size, *, momentum=0.9, epsilon=1e-5, fault=""):
        self.scale, self.bias = nnx.Param(jnp.ones(size)), nnx.Param(jnp.zeros(size))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(size)), nnx.BatchStat(jnp.ones(size))
        self.momentum, self.epsilon, self.fault = momentum, epsilon, fault
        self.use_running_average = False

    def __call__(self, x):
        mean, var, keep = self.mean[...], self.var[...], self.momentum
        if not self.use_running_average:
            new, count = (x.mean((0, 1, 2)), x.var((0, 1, 2))), x[..., 0].size
            unbiased = new[1] if self.fault == "variance" else new[1] * count / (count - 1)
            self.mean[...] = keep * mean + (1 - keep) * jax.lax.stop_gradient(new[0])
            self.var[...] = keep * var + (1 - keep) * jax.lax.stop_gradient(unbiased)
            mean, var = new
        return (x - mean) * jax.lax.rsqrt(var + self.epsilon) * self.scale[...] + self.bias[...]


class ConvNet(nnx.Module):
    def __init__(self, width=8, classes=5, dropout=0.0, *, fault="", rngs):
        momentum = 0.1 if fault == "momentum" else 0.9
        eps = 1e-6 if fault == "eps" else 1e-5
        self.conv1 = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.bn1 = BatchNorm(width)
        self.conv2 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.bn2 = BatchNorm(width, momentum=momentum, epsilon=eps, fault=fault)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.fc = nnx.Linear(width, classes, rngs=rngs)
        self.fault = fault

    def __call__(self, x):
        x = x.transpose(0, 2, 3, 1)
        first, second = self.bn1, self.bn2
        if self.fault == "swapped norms":
            first, second = second, first
        x = nnx.max_pool(nnx.relu(first(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.relu(second(self.conv2(x)))
        deterministic = False if self.fault == "dropout in eval" else None
        return self.fc(self.dropout(x.mean((1, 2)), deterministic=deterministic))


class BasicBlock(nnx.Module):
    def __init__(self, inner, outer, stride, *, fault="", rngs):
        conv = partial(nnx.Conv, use_bias=False, rngs=rngs)
        momentum = 0.1 if fault == "momentum" else 0.9
        self.conv1 = conv(inner, outer, (3, 3), stride, padding=1)
        self.bn1 = BatchNorm(outer)
        low = {"dtype": HALF} if fault == "dtype" else {}
        self.conv2 = conv(outer, outer, (3, 3), padding=1, **low)
        self.bn2 = BatchNorm(outer, momentum=momentum, fault=fault)
        self.down = conv(inner, outer, (1, 1), stride) if stride > 1 else None
        self.bn3 = BatchNorm(outer) if stride > 1 else None
        self.fault = fault

    def __call__(self, x):
        first, second = self.bn1, self.bn2
        if self.fault == "swapped norms":
            first, second = second, first
        y = second(self.conv2(nnx.relu(first(self.conv1(x)))).astype(x.dtype))
        if self.down is not None:
            x = self.bn3(self.down(x))
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    def __init__(self, classes=5, *, fault="", rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.bn = BatchNorm(8)
        self.layer1 = BasicBlock(8, 8, 1, rngs=rngs)
        self.layer2 = BasicBlock(8, 12, 2, fault=fault, rngs=rngs)
        self.fc = nnx.Linear(12, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn(self.stem(x.transpose(0, 2, 3, 1))))
        return self.fc(self.layer2(self.layer1(x)).mean((1, 2)))


class Attention(nnx.Module):
    def __init__(
        self, dim, heads, kv_heads=0, *, bias=True, scaled=True, dtype=None, fault="", rngs
    ):
        kv_heads = kv_heads or heads
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads
        self.scale = self.size**-0.5 if scaled != (fault == "scale") else 1.0
        linear = partial(
            nnx.Linear, use_bias=bias, dtype=dtype, param_dtype=dtype or jnp.float32, rngs=rngs
        )
        self.q = linear(dim, dim)
        self.k = linear(dim, kv_heads * self.size)
        self.v = linear(dim, kv_heads * self.size)
        self.o = linear(dim, dim)
        self.fault = fault

    def __call__(self, x, context=None, mask=None, bias=None, rope=None):
        context = x if context is None else context
        batch, length, _ = x.shape
        q = self.q(x).reshape(batch, length, self.heads, self.size)
        k = self.k(context).reshape(batch, -1, self.kv_heads, self.size)
        v = self.v(context).reshape(batch, -1, self.kv_heads, self.size)
        if self.fault == "bias twice":
            v = v + self.v.bias[...].reshape(self.kv_heads, self.size)
        if rope is not None:
            q, k = rotate(q, *rope, self.fault), rotate(k, *rope, self.fault)
        k = jnp.repeat(k, self.heads // self.kv_heads, 2)
        v = jnp.repeat(v, self.heads // self.kv_heads, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(q.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.o(y.reshape(batch, length, -1))


def rotate(x, cos, sin, fault=""):
    """Halves are rotated, not pairs; heads are behind positions."""
    cos, sin = cos[:, None], sin[:, None]
    if fault == "rope":  # as in the paper, and not as in the checkpoints of Llama
        half = jnp.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    else:
        first, second = jnp.split(x, 2, -1)
        half = jnp.concatenate((-second, first), -1)
    return x * cos + half * sin


def rope_tables(length, size, dtype):
    frequencies = 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.outer(jnp.arange(length), frequencies)
    angles = jnp.concatenate((angles, angles), -1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def causal(length, fault=""):
    return jnp.tri(length, k=1 if fault == "mask" else 0, dtype=bool)


class FeedForward(nnx.Module):
    def __init__(self, dim, approximate="none", *, dtype=None, fault="", rngs):
        kinds = {"param_dtype": dtype or jnp.float32, "rngs": rngs}
        self.fc1 = nnx.Linear(dim, 2 * dim, dtype=dtype, **kinds)
        self.fc2 = nnx.Linear(2 * dim, dim, dtype=HALF if fault == "dtype" else dtype, **kinds)
        self.approximate = approximate == "tanh"
        self.fault = fault

    def __call__(self, x):
        return self.fc2(gelu(self.fc1(x), self.approximate, self.fault)).astype(x.dtype)


class Block(nnx.Module):
    def __init__(self, dim, heads, eps, approximate, *, dtype=None, fault="", rngs):
        kinds = {"dtype": dtype, "rngs": rngs}
        norm = partial(nnx.LayerNorm, dim, param_dtype=dtype or jnp.float32, **kinds)
        other = 1e-5 if eps == 1e-6 else 1e-6
        self.norm1 = norm(epsilon=eps)
        self.attn = Attention(dim, heads, fault=at(fault, "scale", "bias twice"), **kinds)
        self.norm2 = norm(epsilon=other if fault == "eps" else eps)
        self.mlp = FeedForward(dim, approximate, fault=at(fault, "gelu", "dtype"), **kinds)
        self.fault = fault

    def __call__(self, x, mask=None):
        first, second = self.norm1, self.norm2
        if self.fault == "swapped norms":
            first, second = second, first
        x = x + self.attn(first(x), mask=mask)
        return x + self.mlp(second(x))


class ViT(nnx.Module):
    def __init__(self, dim=16, depth=2, classes=5, *, dtype=None, fault="", rngs):
        kinds = {"dtype": dtype, "param_dtype": dtype or jnp.float32, "rngs": rngs}
        self.patch = nnx.Conv(3, dim, (4, 4), 4, padding="VALID", **kinds)
        self.cls = nnx.Param(jnp.zeros((1, 1, dim), kinds["param_dtype"]))
        self.pos = nnx.Param(jnp.zeros((1, 5, dim), kinds["param_dtype"]))
        self.blocks = nnx.List(
            [
                Block(dim, 2, 1e-6, "none", dtype=dtype, fault=fault if i else "", rngs=rngs)
                for i in range(depth)
            ]
        )
        self.norm = nnx.LayerNorm(dim, **kinds)  # its default is 1e-6
        self.head = nnx.Linear(dim, classes, **kinds)

    def __call__(self, x):
        x = self.patch(x.transpose(0, 2, 3, 1))
        batch, _, _, dim = x.shape
        cls = jnp.broadcast_to(self.cls[...], (batch, 1, dim))
        x = jnp.concatenate((cls, x.reshape(batch, -1, dim)), 1) + self.pos[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class BertLayer(nnx.Module):
    def __init__(self, dim, heads, *, fault="", rngs):
        eps = 1e-6 if fault == "eps" else 1e-12
        inner = at(fault, "scale", "bias twice")
        self.attention = Attention(dim, heads, fault=inner, rngs=rngs)
        self.norm1 = nnx.LayerNorm(dim, epsilon=1e-12, rngs=rngs)
        self.mlp = FeedForward(dim, fault=at(fault, "gelu", "dtype"), rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, epsilon=eps, rngs=rngs)
        self.fault = fault

    def __call__(self, x, mask):
        first, second = self.norm1, self.norm2
        if self.fault == "swapped norms":
            first, second = second, first
        x = first(x + self.attention(x, mask=mask))
        return second(x + self.mlp(x))


class Bert(nnx.Module):
    def __init__(self, dim=16, depth=2, vocabulary=29, *, fault="", rngs):
        self.words = nnx.Embed(vocabulary, dim, rngs=rngs)
        self.places = nnx.Embed(16, dim, rngs=rngs)
        self.types = nnx.Embed(2, dim, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List([BertLayer(dim, 2, fault=fault, rngs=rngs) for i in range(depth)])
        self.bias = nnx.Param(jnp.zeros(vocabulary))
        self.fault = fault

    def __call__(self, ids, types, lengths):
        places = jnp.arange(ids.shape[1])
        x = self.norm(self.words(ids) + self.places(places) + self.types(types))
        seen = places <= lengths[:, None] if self.fault == "mask" else places < lengths[:, None]
        for layer in self.layers:
            x = layer(x, seen[:, None, None])
        return self.words.attend(x) + self.bias[...]


def next_token_loss(logits, labels, fault=""):
    logits = logits.astype(jnp.float32)
    if fault == "label shift":  # the label is the token itself
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    else:
        each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], labels[:, 1:])
    return each.mean()


class GPT(nnx.Module):
    def __init__(self, dim=16, depth=2, vocabulary=29, *, fault="", rngs):
        self.wte = nnx.Embed(vocabulary, dim, rngs=rngs)
        self.wpe = nnx.Embed(16, dim, rngs=rngs)
        self.h = nnx.List(
            [Block(dim, 2, 1e-5, "tanh", fault=fault if i else "", rngs=rngs) for i in range(depth)]
        )
        self.ln_f = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.fault = fault

    def __call__(self, ids, labels=None):
        length = ids.shape[1]
        x = self.wte(ids) + self.wpe(jnp.arange(length))
        for block in self.h:
            x = block(x, causal(length, self.fault))
        logits = self.wte.attend(self.ln_f(x))
        return logits if labels is None else next_token_loss(logits, labels, self.fault)


class RMSNorm(nnx.Module):
    def __init__(self, dim, eps):
        self.scale = nnx.Param(jnp.ones(dim))
        self.eps = eps

    def __call__(self, x):
        variance = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
        return (x * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype) * self.scale[...]


class LlamaLayer(nnx.Module):
    def __init__(self, dim, *, fault="", rngs):
        self.input_norm = RMSNorm(dim, 1e-5)
        inner = at(fault, "scale", "rope")
        self.attn = Attention(dim, 4, 2, bias=False, fault=inner, rngs=rngs)
        self.post_norm = RMSNorm(dim, 1e-6 if fault == "eps" else 1e-5)
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate = linear(dim, 2 * dim)
        self.up = linear(dim, 2 * dim)
        self.down = linear(2 * dim, dim, dtype=HALF if fault == "dtype" else None)
        self.fault = fault

    def __call__(self, x, mask, rope):
        first, second = self.input_norm, self.post_norm
        if self.fault == "swapped norms":
            first, second = second, first
        x = x + self.attn(first(x), mask=mask, rope=rope)
        y = second(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y)).astype(x.dtype)


class Llama(nnx.Module):
    def __init__(self, dim=16, depth=2, vocabulary=29, *, fault="", rngs):
        self.embed = nnx.Embed(vocabulary, dim, rngs=rngs)
        self.layers = nnx.List(
            [LlamaLayer(dim, fault=fault if i else "", rngs=rngs) for i in range(depth)]
        )
        self.norm = RMSNorm(dim, 1e-5)
        self.head = nnx.Linear(dim, vocabulary, use_bias=False, rngs=rngs)
        self.fault = fault

    def __call__(self, ids, labels=None):
        x = self.embed(ids)
        rope = rope_tables(ids.shape[1], 4, x.dtype)
        for layer in self.layers:
            x = layer(x, causal(ids.shape[1], self.fault), rope)
        logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels, self.fault)


class T5Layer(nnx.Module):
    def __init__(self, dim, *, fault="", rngs):
        self.norm1 = RMSNorm(dim, 1e-6)
        self.attn = Attention(dim, 2, bias=False, scaled=False, fault=at(fault, "scale"), rngs=rngs)
        self.norm2 = RMSNorm(dim, 1e-5 if fault == "eps" else 1e-6)
        self.wi = nnx.Linear(dim, 2 * dim, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(2 * dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, x, bias, mask):
        x = x + self.attn(self.norm1(x), bias=bias, mask=mask)
        return x + self.wo(nnx.relu(self.wi(self.norm2(x))))


class T5Encoder(nnx.Module):
    def __init__(self, dim=16, depth=2, vocabulary=29, *, fault="", rngs):
        self.embed = nnx.Embed(vocabulary, dim, rngs=rngs)
        self.buckets = nnx.Embed(8, 2, rngs=rngs)
        self.layers = nnx.List([T5Layer(dim, fault=fault, rngs=rngs) for _ in range(depth)])
        self.norm = RMSNorm(dim, 1e-6)
        self.fault = fault

    def __call__(self, ids, lengths):
        place = jnp.arange(ids.shape[1])
        away = place[None] - place[:, None]
        bias = self.buckets(jnp.where(away > 0, 4, 0) + jnp.minimum(abs(away), 3))
        bias = bias.transpose(2, 0, 1)
        if self.fault == "bias twice":
            bias = bias * 2
        until = lengths[:, None] + (self.fault == "mask")
        mask = (place < until)[:, None, None]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, bias, mask)
        return self.norm(x)


class UBlock(nnx.Module):
    def __init__(self, inner, outer, time, *, fault="", rngs):
        eps = 1e-6 if fault == "eps" else 1e-5  # that of Flax, and that of PyTorch
        self.norm1 = nnx.GroupNorm(inner, 4, epsilon=1e-5, rngs=rngs)
        self.conv1 = nnx.Conv(inner, outer, (3, 3), rngs=rngs)
        self.time = nnx.Linear(time, outer, rngs=rngs)
        self.norm2 = nnx.GroupNorm(outer, 4, epsilon=eps, rngs=rngs)
        self.conv2 = nnx.Conv(
            outer, outer, (3, 3), dtype=HALF if fault == "dtype" else None, rngs=rngs
        )
        self.skip = nnx.Conv(inner, outer, (1, 1), rngs=rngs)
        self.fault = fault

    def __call__(self, x, time):
        first, second = self.norm1, self.norm2
        if self.fault == "swapped norms":
            first, second = second, first
        y = self.conv1(nnx.silu(first(x))) + self.time(time)[:, None, None]
        return self.skip(x) + self.conv2(nnx.silu(second(y))).astype(x.dtype)


class UNet(nnx.Module):
    """Images have their channels last outside as well."""

    def __init__(self, width=8, *, fault="", rngs):
        self.time1 = nnx.Linear(width, width, rngs=rngs)
        self.time2 = nnx.Linear(width, width, rngs=rngs)
        self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.down = UBlock(width, width, width, rngs=rngs)
        self.shrink = nnx.Conv(width, width, (3, 3), 2, padding=1, rngs=rngs)
        self.middle = UBlock(width, width, width, fault=fault, rngs=rngs)
        self.grow = nnx.Conv(width, width, (3, 3), rngs=rngs)
        self.up = UBlock(2 * width, width, width, rngs=rngs)
        self.last = nnx.Conv(width, 3, (3, 3), rngs=rngs)
        self.width = width
        self.fault = fault

    def __call__(self, x, t):
        half = self.width // 2
        angles = t[:, None] * jnp.exp(-math.log(10_000) * jnp.arange(half) / half)
        waves = (jnp.sin(angles), jnp.cos(angles))
        time = jnp.concatenate(waves[::-1] if self.fault == "order of waves" else waves, -1)
        time = self.time2(nnx.silu(self.time1(time)))
        skip = self.down(self.stem(x.transpose(0, 2, 3, 1)), time)
        y = self.middle(self.shrink(skip), time)
        y = self.grow(jnp.repeat(jnp.repeat(y, 2, 1), 2, 2))
        y = self.last(self.up(jnp.concatenate((y, skip), -1), time))
        return y.transpose(0, 3, 1, 2)


class MixerBlock(nnx.Module):
    def __init__(self, dim, tokens, *, fault="", rngs):
        self.norm1 = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.tokens = FeedForward(tokens, rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, epsilon=1e-6 if fault == "eps" else 1e-5, rngs=rngs)
        self.channels = FeedForward(dim, fault=fault, rngs=rngs)
        self.fault = fault

    def __call__(self, x):
        first, second = self.norm1, self.norm2
        if self.fault == "swapped norms":
            first, second = second, first
        x = x + self.tokens(first(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.channels(second(x))


class Mixer(nnx.Module):
    def __init__(self, dim=12, *, fault="", rngs):
        self.patch = nnx.Conv(3, dim, (4, 4), 4, padding="VALID", rngs=rngs)
        self.blocks = nnx.List(
            [MixerBlock(dim, 4, fault=fault if i else "", rngs=rngs) for i in range(2)]
        )
        self.norm = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(dim, 5, rngs=rngs)

    def __call__(self, x):
        x = self.patch(x.transpose(0, 2, 3, 1))
        x = x.reshape(len(x), -1, x.shape[-1])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class MoE(nnx.Module):
    def __init__(self, dim=12, experts=4, *, dtype=None, fault="", rngs):
        kind = dtype or jnp.float32
        eps = 1e-6 if fault == "eps" else 1e-5
        self.norm = nnx.LayerNorm(dim, epsilon=eps, dtype=dtype, param_dtype=kind, rngs=rngs)
        self.router = nnx.Linear(
            dim, experts, use_bias=False, dtype=dtype, param_dtype=kind, rngs=rngs
        )
        self.w1 = nnx.Param(jnp.zeros((experts, dim, 2 * dim), kind))
        self.w2 = nnx.Param(jnp.zeros((experts, 2 * dim, dim), kind))
        self.b2 = nnx.Param(jnp.zeros((experts, dim), kind))
        self.fault = fault

    def __call__(self, x):
        y = self.norm(x)
        chances = jax.nn.softmax(self.router(y).astype(jnp.float32), -1)
        best, chosen = jax.lax.top_k(chances, 2)
        if self.fault != "scale":
            best = best / best.sum(-1, keepdims=True)
        gates = (jax.nn.one_hot(chosen, chances.shape[-1]) * best[..., None]).sum(-2)
        inner = gelu(jnp.einsum("bsd,edf->bsef", y, self.w1[...]), False, self.fault)
        outer = jnp.einsum("bsef,efd->bsed", inner, self.w2[...]) + self.b2[...]
        if self.fault == "bias twice":
            outer = outer + self.b2[...]
        mixed = jnp.einsum("bsed,bse->bsd", outer, gates.astype(x.dtype))
        return x + mixed, (chances.mean((0, 1)) ** 2).sum()


class ConvNeXtBlock(nnx.Module):
    def __init__(self, dim, *, fault="", rngs):
        self.conv = nnx.Conv(dim, dim, (7, 7), feature_group_count=dim, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, epsilon=1e-5 if fault == "eps" else 1e-6, rngs=rngs)
        self.fc1 = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.fc2 = nnx.Linear(4 * dim, dim, rngs=rngs)
        self.gamma = nnx.Param(jnp.ones(dim))
        self.fault = fault

    def __call__(self, x):
        y = self.fc2(gelu(self.fc1(self.norm(self.conv(x))), False, self.fault))
        return x + (y if self.fault == "scale" else self.gamma[...] * y)


class ConvNeXt(nnx.Module):
    def __init__(self, dim=8, *, fault="", rngs):
        self.stem = nnx.Conv(3, dim, (2, 2), 2, rngs=rngs)
        self.blocks = nnx.List(
            [ConvNeXtBlock(dim, fault=fault if i else "", rngs=rngs) for i in range(2)]
        )
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(dim, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x.transpose(0, 2, 3, 1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((1, 2))))


class Perceiver(nnx.Module):
    def __init__(self, dim=16, *, fault="", rngs):
        self.queries = nnx.Param(jnp.zeros((1, 3, dim)))
        self.norm1 = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.attn = Attention(dim, 4, fault=fault, rngs=rngs)
        self.mlp = FeedForward(dim, fault=fault, rngs=rngs)
        self.head = nnx.Linear(dim, 5, rngs=rngs)
        self.fault = fault

    def __call__(self, x, lengths):
        until = lengths[:, None] - (self.fault == "mask")
        mask = (jnp.arange(x.shape[1]) < until)[:, None, None]
        queries = jnp.repeat(self.queries[...], len(x), 0)
        first, second = self.norm1, self.norm2
        if self.fault == "swapped norms":
            first, second = second, first
        y = queries + self.attn(first(queries), second(x), mask=mask)
        return self.head((y + self.mlp(y)).mean(1))


class Average(nnx.Variable):
    """What is a moving average of parameters."""


class BYOL(nnx.Module):
    def __init__(self, dim=12, decay=0.9, *, fault="", rngs):
        self.online = nnx.Linear(dim, dim, rngs=rngs)
        self.predictor = nnx.Linear(dim, dim, rngs=rngs)
        self.target_kernel = Average(jnp.zeros((dim, dim)))
        self.target_bias = Average(jnp.zeros(dim))
        self.decay = 1 - decay if fault == "momentum" else decay
        self.deterministic = False
        self.fault = fault

    def __call__(self, x, y):
        guess = self.predictor(nnx.relu(self.online(x)))
        wanted = nnx.relu(y @ self.target_kernel[...] + self.target_bias[...])
        wanted = wanted + 0.1 * self.online(y)
        if self.fault != "stop-gradient":
            wanted = jax.lax.stop_gradient(wanted)
        away = normalized(guess) - normalized(wanted)
        if not self.deterministic and self.fault != "ema":
            kernel, bias = self.online.kernel[...], self.online.bias[...]
            kernel, bias = jax.lax.stop_gradient((kernel, bias))
            keep = self.decay
            self.target_kernel[...] = keep * self.target_kernel[...] + (1 - keep) * kernel
            self.target_bias[...] = keep * self.target_bias[...] + (1 - keep) * bias
        return jnp.square(away).sum(-1).mean()


def normalized(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


class VQ(nnx.Module):
    def __init__(self, dim=6, codes=8, *, fault="", rngs):
        self.enc = nnx.Linear(dim, dim, rngs=rngs)
        self.codes = Average(jnp.zeros((codes, dim)))
        self.counts = Average(jnp.zeros(codes))
        self.dec = nnx.Linear(dim, dim, rngs=rngs)
        self.deterministic = False
        self.fault = fault

    def __call__(self, x):
        z, codes, stop = self.enc(x), self.codes[...], jax.lax.stop_gradient
        best = jnp.square(z[:, None] - codes).sum(-1).argmin(-1)
        hot = jax.nn.one_hot(best, len(codes))
        if not self.deterministic:
            keep, new = (0.1, 0.9) if self.fault == "momentum" else (0.9, 0.1)
            if self.fault != "ema":
                self.counts[...] = keep * self.counts[...] + new * hot.sum(0)
            self.codes[...] = stop(keep * codes + new * hot.T @ z)
        code = codes[best]
        through = code if self.fault == "stop-gradient" else z + stop(code - z)
        return self.dec(through), jnp.square(z - stop(code)).mean()


class CLIP(nnx.Module):
    def __init__(self, dim=12, *, fault="", rngs):
        self.image1 = nnx.Linear(10, dim, rngs=rngs)
        self.image2 = nnx.Linear(dim, dim, rngs=rngs)
        self.text1 = nnx.Embed(29, dim, rngs=rngs)
        self.text2 = nnx.Linear(dim, dim, rngs=rngs)
        self.logit_scale = nnx.Param(jnp.zeros(()))
        self.fault = fault

    def __call__(self, image, ids):
        a = normalized(self.image2(gelu(self.image1(image), False, self.fault)))
        text = self.text2(self.text1(ids).mean(1))
        if self.fault == "bias twice":
            text = text + self.text2.bias[...]
        scale = self.logit_scale[...]
        return (scale if self.fault == "scale" else jnp.exp(scale)) * (a @ normalized(text).T)


class Frozen(nnx.Variable):
    """What is not trained."""


class Finetune(nnx.Module):
    """Filters of the optimizer see which parameters are of the backbone by their type."""

    def __init__(self, dim=16, dropout=0.0, *, fault="", rngs):
        self.backbone = FeedForward(dim, rngs=rngs)
        if fault != "frozen":
            for linear in (self.backbone.fc1, self.backbone.fc2):
                linear.kernel = Frozen(linear.kernel[...])
                linear.bias = Frozen(linear.bias[...])
        self.norm = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(dim, 5, rngs=rngs)
        self.fault = fault

    def __call__(self, x):
        x = self.norm(x + self.backbone(x))
        deterministic = False if self.fault == "dropout in eval" else None
        return self.head(self.dropout(x, deterministic=deterministic))


class GRU(nnx.Module):
    """With the cell of Flax, whose reset gate multiplies what PyTorch's does."""

    def __init__(self, dim=12, tags=5, *, fault="", rngs):
        self.embed = nnx.Embed(29, dim, rngs=rngs)
        self.x = nnx.Linear(dim, 3 * dim, rngs=rngs)
        self.h = nnx.Linear(dim, 3 * dim, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6 if fault == "eps" else 1e-5, rngs=rngs)
        self.head = nnx.Linear(dim, tags, rngs=rngs)
        self.fault = fault

    def __call__(self, ids):
        inputs = self.x(self.embed(ids))
        h = jnp.zeros((len(ids), inputs.shape[-1] // 3))
        states = []
        for t in range(ids.shape[1]):
            xr, xz, xn = jnp.split(inputs[:, t], 3, -1)
            hr, hz, hn = jnp.split(self.h(h), 3, -1)
            if self.fault == "bias twice":
                hn = hn + jnp.split(self.h.bias[...], 3)[2]
            z = nnx.sigmoid(xz + hz)
            n = jnp.tanh(xn + nnx.sigmoid(xr + hr) * hn)
            h = (1 - z) * n + z * h
            states.append(h)
        return self.head(self.norm(jnp.stack(states, 1)))
