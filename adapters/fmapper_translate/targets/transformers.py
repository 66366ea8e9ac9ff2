"""Counterparts of the infrastructure of transformers in files for JAX.

A file takes the source of those that it names.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

ACT2FN = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_10": lambda x: jnp.clip(jax.nn.gelu(x, approximate=False), -10, 10),
    "gelu_new": jax.nn.gelu,
    "gelu_fast": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "hardswish": jax.nn.hard_swish,
    "leaky_relu": jax.nn.leaky_relu,
    "linear": lambda x: x,
    "mish": jax.nn.mish,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


def get_activation(name):
    """Returns an activation by its name in configurations."""
    return ACT2FN[name]


class ModelOutput:
    """A record of arrays, which has those that are not None by name and by number, too."""

    def to_tuple(self):
        """Returns the arrays in their order."""
        return tuple(value for value in vars(self).values() if value is not None)

    def __getitem__(self, key):
        return getattr(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def __len__(self):
        return len(self.to_tuple())


def make_mask(inputs_embeds, attention_mask, sees, position_ids=None, length=None):
    """Returns what is added to scores: 0 where a query sees a key, the least number elsewhere.

    Args:
        inputs_embeds: The queries, (batch, length, width).
        attention_mask: 0 at padding, (batch, keys); or the mask itself, (batch, 1, queries, keys).
        sees: Whether a query sees a key, of the numbers of both.
        position_ids: The positions of packed sequences, each of which begins anew.
        length: The number of keys, if it is not that of the queries.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask
    batch, count = inputs_embeds.shape[:2]
    query = jnp.arange(count)[:, None]
    key = jnp.arange(count if length is None else length)
    mask = jnp.broadcast_to(sees(query, key), (batch, 1, count, key.size))
    if attention_mask is not None:
        mask &= attention_mask[:, None, None, :].astype(bool)
    elif position_ids is not None:
        begins = jnp.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
        sequence = jnp.broadcast_to(begins.cumsum(-1), (batch, count))
        mask &= (sequence[:, :, None] == sequence[:, None, :])[:, None]
    return jnp.where(mask, 0, jnp.finfo(inputs_embeds.dtype).min).astype(inputs_embeds.dtype)


def create_causal_mask(config, inputs_embeds, attention_mask=None, position_ids=None):
    """Returns the mask where each query sees itself and what is before."""
    return make_mask(inputs_embeds, attention_mask, lambda q, k: k <= q, position_ids)


def create_recurrent_attention_mask(
    config, inputs_embeds, attention_mask=None, position_ids=None
):  # fmt: skip
    """Returns 0 at padding and 1 elsewhere, (batch, length); None if nothing says that."""
    if attention_mask is None or attention_mask.ndim != 2 or inputs_embeds.shape[1] == 1:
        return None
    return attention_mask[:, -inputs_embeds.shape[1] :]


def create_sliding_window_causal_mask(
    config, inputs_embeds, attention_mask=None, position_ids=None
):
    """Returns the mask where each query sees itself and what is shortly before."""

    def sees(q, k):
        return (k <= q) & (k > q - config.sliding_window)

    return make_mask(inputs_embeds, attention_mask, sees, position_ids)


def create_chunked_causal_mask(config, inputs_embeds, attention_mask=None, position_ids=None):
    """Returns the mask where each query sees itself and what is before in its chunk."""
    begin = 0
    if attention_mask is not None:  # chunks begin behind the padding on the left
        begin = (attention_mask.cumsum(-1) == 0).sum(-1)[:, None, None, None]

    def sees(q, k):
        size = config.attention_chunk_size
        return (k <= q) & ((k - begin) // size == (q - begin) // size)

    return make_mask(inputs_embeds, attention_mask, sees, position_ids)


def create_bidirectional_mask(
    config, inputs_embeds, attention_mask=None, encoder_hidden_states=None,
    allow_is_bidirectional_skip=True,
):  # fmt: skip
    """Returns the mask of padding; None if there is none and that is allowed."""
    if attention_mask is None and allow_is_bidirectional_skip:
        return None
    length = None if encoder_hidden_states is None else encoder_hidden_states.shape[1]
    return make_mask(inputs_embeds, attention_mask, lambda q, k: (q >= 0) & (k >= 0), length=length)


def create_bidirectional_sliding_window_mask(config, inputs_embeds, attention_mask=None):
    """Returns the mask where each query sees what is near."""

    def sees(q, k):
        return abs(q - k) <= config.sliding_window

    return make_mask(inputs_embeds, attention_mask, sees)
