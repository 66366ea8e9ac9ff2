"""A language model with causal attention and dropout, in the manner of Equinox's BERT example."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr


class AttentionBlock(eqx.Module):
    """A single attention block, whose dropout is off unless a call enables it."""

    attention: eqx.nn.MultiheadAttention
    layernorm: eqx.nn.LayerNorm
    mlp: eqx.nn.Linear
    output: eqx.nn.Linear
    final: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, size, intermediate, heads, rate, key):
        akey, mkey, okey = jr.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(
            num_heads=heads, query_size=size, use_output_bias=True, dropout_p=rate, key=akey
        )
        self.layernorm = eqx.nn.LayerNorm(shape=size)
        self.mlp = eqx.nn.Linear(size, intermediate, key=mkey)
        self.output = eqx.nn.Linear(intermediate, size, key=okey)
        self.final = eqx.nn.LayerNorm(shape=size)
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, inputs, *, key=None):
        length = inputs.shape[0]
        mask = jnp.tril(jnp.ones((length, length), dtype=bool))
        akey, dkey = (None, None) if key is None else jr.split(key)
        result = self.attention(inputs, inputs, inputs, mask=mask, key=akey)
        result = jax.vmap(self.layernorm)(result + inputs)
        hidden = jax.nn.gelu(jax.vmap(self.mlp)(result))
        hidden = self.dropout(jax.vmap(self.output)(hidden), key=dkey)
        return jax.vmap(self.final)(hidden + result)


class LM(eqx.Module):
    token_embedder: eqx.nn.Embedding
    position_embedder: eqx.nn.Embedding
    layers: list[AttentionBlock]
    head: eqx.nn.Linear

    def __init__(self, vocab, max_length, size, intermediate, depth, heads, rate, key):
        tkey, pkey, hkey, lkey = jr.split(key, 4)
        self.token_embedder = eqx.nn.Embedding(vocab, size, key=tkey)
        self.position_embedder = eqx.nn.Embedding(max_length, size, key=pkey)
        self.layers = []
        for layer_key in jr.split(lkey, depth):
            self.layers.append(AttentionBlock(size, intermediate, heads, rate, layer_key))
        self.head = eqx.nn.Linear(size, vocab, use_bias=False, key=hkey)

    def __call__(self, tokens, *, key=None):
        positions = jnp.arange(tokens.shape[-1])
        x = jax.vmap(self.token_embedder)(tokens) + jax.vmap(self.position_embedder)(positions)
        for layer in self.layers:
            lkey, key = (None, None) if key is None else jr.split(key)
            x = layer(x, key=lkey)
        return jax.vmap(self.head)(x)


def build():
    """Returns a small model, its inputs, the arguments that made it, and a call's keywords."""
    sizes = (11, 12, 8, 12, 2, 2, 0.1)
    tokens = jr.randint(jr.key(1), (7,), 0, 11)
    return LM(*sizes, jr.key(0)), (tokens,), (sizes, {}), {}
