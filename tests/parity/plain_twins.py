"""Twins as functions of a dict of parameters, in JAX alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp

HALF = jnp.bfloat16


def dense(p, x, fault=""):
    if fault == "dtype":
        return (x.astype(HALF) @ p["w"].astype(HALF) + p["b"].astype(HALF)).astype(x.dtype)
    y = x @ p["w"] + p["b"] if "b" in p else x @ p["w"]
    return y + p["b"] if fault == "bias twice" else y


def layer_norm(p, x, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + eps) * p["w"] + p["b"]


def rms_norm(p, x, eps):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return p["w"] * y.astype(x.dtype)


def mlp(p, x, fault=""):
    one, two = ("norm2", "norm1") if fault == "swapped norms" else ("norm1", "norm2")
    x = jax.nn.gelu(layer_norm(p[one], dense(p["fc1"], x)), approximate=False)
    y = layer_norm(p[two], dense(p["fc2"], x, fault), 1e-6 if fault == "eps" else 1e-5)
    return dense(p["head"], x + jax.nn.gelu(y, approximate=fault == "gelu"))


def heads(x, count):
    return x.reshape(*x.shape[:-1], count, -1).swapaxes(1, 2)


def attend(q, k, v, mask, scale):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * scale
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(q.dtype)
    return jnp.einsum("bhqk,bhkd->bqhd", weights, v).reshape(len(q), q.shape[2], -1)


def next_token_loss(logits, labels, fault):
    logits, labels = logits[:, :-1], labels[:, :-1] if fault == "label shift" else labels[:, 1:]
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(chances, labels[..., None], -1).mean()


def gpt(p, ids, labels, fault=""):
    length = ids.shape[1]
    x = p["wte"]["w"][ids] + p["wpe"]["w"][:length]
    mask = jnp.tril(jnp.ones((length, length), bool), 1 if fault == "mask" else 0)
    for i, b in enumerate(p["h"].values()):
        here = fault if i else ""
        y = layer_norm(b["norm1"], x)
        q, k, v = (heads(dense(b["attn"][name], y), 2) for name in "qkv")
        scale = 1.0 if here == "scale" else q.shape[-1] ** -0.5
        x = x + dense(b["attn"]["o"], attend(q, k, v, mask, scale))
        y = layer_norm(b["norm2"], x, 1e-6 if here == "eps" else 1e-5)
        y = jax.nn.gelu(dense(b["mlp"]["fc1"], y), approximate=here != "gelu")
        x = x + dense(b["mlp"]["fc2"], y, here)
    return next_token_loss(layer_norm(p["ln_f"], x) @ p["wte"]["w"].T, labels, fault)


def rotate(x, fault):
    """Turns pairs of numbers as complex ones; the two of a pair are half a head apart."""
    size = x.shape[-1]
    rate = 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(x.shape[2])[:, None] * rate
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    if fault == "rope":
        a, b = x[..., ::2], x[..., 1::2]
        return jnp.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)
    a, b = x[..., : size // 2], x[..., size // 2 :]
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def llama(p, ids, fault=""):
    x = p["embed"]["w"][ids]
    mask = jnp.tri(ids.shape[1], k=1 if fault == "mask" else 0, dtype=bool)
    for i, b in enumerate(p["layers"].values()):
        here = fault if i else ""
        one, two = ("norm2", "norm1") if here == "swapped norms" else ("norm1", "norm2")
        y = rms_norm(b[one], x, 1e-5)
        q, k, v = (
            heads(dense(b["attn"][name], y), n) for name, n in zip("qkv", (4, 2, 2), strict=True)
        )
        q, k = rotate(q, here), rotate(k, here)
        k, v = jnp.repeat(k, 2, 1), jnp.repeat(v, 2, 1)
        scale = 1.0 if here == "scale" else q.shape[-1] ** -0.5
        x = x + dense(b["attn"]["o"], attend(q, k, v, mask, scale))
        y = rms_norm(b[two], x, 1e-2 if here == "eps" else 1e-5)
        x = x + dense(b["down"], jax.nn.silu(dense(b["gate"], y)) * dense(b["up"], y))
    return dense(p["head"], rms_norm(p["norm"], x, 1e-5))


def lstm(p, ids, fault=""):
    x, r = p["embed"]["w"][ids], p["rnn"]
    size = r["weight_hh_l0"].shape[1]

    def step(carry, x):
        h, c = carry
        gates = x @ r["weight_ih_l0"].T + r["bias_ih_l0"] + h @ r["weight_hh_l0"].T
        gates = gates + r["bias_hh_l0"] * (2 if fault == "bias twice" else 1)
        i, f, g, o = jnp.split(gates, 4, -1)
        if fault == "order of gates":
            f, g = g, f
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((2, len(ids), size))
    _, y = jax.lax.scan(step, (start[0], start[1]), x.swapaxes(0, 1))
    y = layer_norm(p["norm"], y.swapaxes(0, 1), 1e-6 if fault == "eps" else 1e-5)
    return dense(p["head"], y, "dtype" if fault == "dtype" else "")


def q_values(p, x):
    h = jax.nn.relu(dense(p["trunk"], x))
    advantage = dense(p["advantage"], h)
    return dense(p["value"], h) + advantage - advantage.mean(-1, keepdims=True)


def dqn(p, state, action, reward, after, fault=""):
    taken = jnp.take_along_axis(q_values(p, state), action[:, None], -1)[:, 0]
    best = q_values(p, after).max(-1)
    wanted = reward + 0.9 * (best if fault == "stop-gradient" else jax.lax.stop_gradient(best))
    if fault == "scale":
        wanted = reward + jax.lax.stop_gradient(best)
    away = jnp.abs(taken - wanted)
    return jnp.where(away < 1, 0.5 * away**2, away - 0.5).mean()
