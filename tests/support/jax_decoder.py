"""A small decoder in plain JAX, with nothing but products, norms and attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, WIDTH, HEADS, INNER = 32, 16, 4, 32


def parameters(layers: int = 2) -> dict[str, Any]:
    """Draws weights as inputs by outputs, as JAX has them."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    blocks = [
        {
            **{name: draw(WIDTH, WIDTH) for name in "qkvo"},
            **{name: draw(WIDTH, INNER) for name in ("up", "gate")},
            "down": draw(INNER, WIDTH),
            "scale": jnp.ones(WIDTH),
        }
        for _ in range(layers)
    ]
    return {"table": draw(VOCABULARY, WIDTH), "layers": blocks, "head": draw(WIDTH, VOCABULARY)}


def decoder(params: dict[str, Any], ids: Any) -> Any:
    """Returns the logits of tokens (batch, length)."""
    x = jnp.take(params["table"], ids, axis=0)
    for layer in params["layers"]:
        x = x + _attention(layer, _norm(layer, x))
        h = _norm(layer, x)
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return x @ params["head"]


def _norm(layer: dict[str, Any], x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * layer["scale"]


def _attention(layer: dict[str, Any], x: Any) -> Any:
    heads = (*x.shape[:-1], HEADS, WIDTH // HEADS)
    q, k, v = ((x @ layer[name]).reshape(heads) for name in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return y.reshape(x.shape) @ layer["o"]
