"""A Flax decoder with its cache, served by a loop in torch: the same tokens.

The decoder computes one token at a time. Its cache is a dict of arrays that it takes and gives, so
that the step is a function, and `fmapper.convert` makes a module of torch of it that needs no JAX.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import fmapper

TOKENS, WIDTH, HEADS, PLACES = 50, 32, 4, 40


class Layer(nnx.Module):
    """Attention over a cache of fixed size, then a dense layer."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.between = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, keys, values, at):
        """The new x of shape (rows, width), and the cache with the state of this token in it."""
        q, k, v = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
        rows = len(x)
        keys = jax.lax.dynamic_update_slice(keys, k.reshape(rows, 1, HEADS, -1), (0, at, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v.reshape(rows, 1, HEADS, -1), (0, at, 0, 0))
        scores = jnp.einsum("bhd,bshd->bhs", q.reshape(rows, HEADS, -1), keys) / 8**0.5
        scores = jnp.where(jnp.arange(PLACES) <= at, scores, -jnp.inf)
        mixed = jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), values)
        x = x + self.out(mixed.reshape(rows, -1))
        return x + self.down(nnx.gelu(self.up(self.between(x)))), keys, values


class Decoder(nnx.Module):
    """One token more: logits, and the cache."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(PLACES, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)

    def __call__(self, tokens, cache):
        at = cache["at"]
        x = self.embed(tokens) + self.places(at)
        keys, values = [], []
        for layer, k, v in zip(self.layers, cache["keys"], cache["values"], strict=True):
            x, *new = layer(x, k, v, at)
            keys.append(new[0])
            values.append(new[1])
        return self.head(x), {"at": at + 1, "keys": keys, "values": values}


def empty(rows):
    """A cache with nothing in it."""
    states = [jnp.zeros((rows, PLACES, HEADS, WIDTH // HEADS)) for _ in range(2)]
    return {"at": jnp.int32(0), "keys": states, "values": states}


def generate(step, prompts, cache, count):
    """The likeliest tokens after prompts of one length, by a loop that JAX and torch share."""
    logits = None
    for column in prompts.T:
        logits, cache = step(column, cache)
    found = []
    for _ in range(count):
        token = logits.argmax(-1)
        found.append(np.asarray(token))
        logits, cache = step(token, cache)
    return np.stack(found, 1)


def main():
    """Converts the decoder, and generates with both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=24, help="of new tokens (default: 24)")
    options = parser.parse_args()
    decoder = Decoder(nnx.Rngs(0))
    prompts = jax.random.randint(jax.random.key(1), (3, 6), 0, TOKENS)
    cache = empty(len(prompts))
    served = fmapper.convert(decoder, "torch", (prompts[:, 0], cache)).eval()
    print(served.__class__.__name__, sum(p.numel() for p in served.parameters()), "parameters")

    want = generate(nnx.jit(decoder), prompts, cache, options.count)
    with torch.no_grad():
        given = fmapper.to_torch((prompts, cache))
        got = generate(served, *given, options.count)
    print(got)
    print(f"Flax writes {'the same' if np.array_equal(got, want) else 'other tokens'}")
    assert np.array_equal(got, want)


if __name__ == "__main__":
    main()
