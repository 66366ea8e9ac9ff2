"""T5ForConditionalGeneration for Equinox, transcribed from models.repositories.t5"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from collections.abc import Callable


class Embedding(eqx.nn.Embedding):
    """A table of vectors, of which that of padding is not trained."""

    padding_idx: int | None = eqx.field(static=True)

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, *, key):
        super().__init__(num_embeddings, embedding_dim, key=key)
        self.padding_idx = padding_idx
        if padding_idx is not None:
            self.weight = self.weight.at[padding_idx].set(0.0)

    def __call__(self, ids):
        x = self.weight[ids]
        if self.padding_idx is None:
            return x
        is_padding = (ids == self.padding_idx % self.num_embeddings)[..., None]
        return jnp.where(is_padding, jax.lax.stop_gradient(x), x)

    def attend(self, x):
        return x @ self.weight.T


class Keys:
    """Gives a new random key at each call; None where it was made with None."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        if self.key is None:
            return None
        self.key, new = jax.random.split(self.key)
        return new


class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __init__(self, in_features, out_features, bias=True, *, key):
        super().__init__(in_features, out_features, use_bias=bias, key=key)

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


def hide_shared(model):
    """Removes parts of a new model from all places but the first; returns those places.

    A tree would have copies there, which training changes apart.
    """
    first, hidden = {}, []

    def walk(owner, path):
        held = vars(owner) if isinstance(owner, eqx.Module) else owner
        pairs = held.items() if isinstance(held, dict) else enumerate(held)
        for step, part in list(pairs):
            at = (*path, step)
            if not isinstance(part, eqx.Module | list | tuple | dict):
                continue
            if isinstance(part, eqx.Module):
                if id(part) in first:
                    hidden.append((at, first[id(part)]))
                    set_part(owner, step, None)
                    continue
                first[id(part)] = at
            walk(part, at)

    walk(model, ())
    return tuple(hidden)


def layer_norm(x, axes=1, weight=None, bias=None, eps=1e-5):
    """Normalises the last axes to zero mean and unit variance, in float32."""
    axis = tuple(range(-axes, 0))
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = y - y.mean(axis=axis, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=axis, keepdims=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.astype(x.dtype)


def name_in_source(model, path):
    """Returns the name of an array in the source's state dict; None if it is not there."""
    steps = [*steps_to(model, path)]
    if not all(settings_of(*step).get("saved", True) for step in steps):
        return None
    return ".".join(str(name) for owner, name in steps if name != getattr(owner, "inside", None))


def settings_of(owner, name):
    """Returns how a field of a module is declared."""
    return type(owner).__dataclass_fields__[name].metadata if isinstance(owner, eqx.Module) else {}


def show_shared(model):
    """Returns a model with its shared parts in all their places, for one call."""
    for path, first in model.shared_parts:
        part = model
        for step in first:
            part = getattr(part, step) if isinstance(part, eqx.Module) else part[step]
        model = with_part(model, path, part)
    return model


def steps_to(model, path):
    """Yields the parts on a key path, and the name or number of the next one in each."""
    owner = model
    for step in path:
        name = next(getattr(step, kind) for kind in ("name", "key", "idx") if hasattr(step, kind))
        yield owner, name
        owner = getattr(owner, name) if isinstance(owner, eqx.Module) else owner[name]


def set_part(owner, name, value):
    """Gives a part of a model that is still being made another array or module."""
    if isinstance(owner, eqx.Module):
        object.__setattr__(owner, name, value)
    else:
        owner[name] = value


def with_part(owner, path, part):
    """Returns a copy of a module or container with another part, which has the other ones."""
    if not path:
        return part
    new, (step, *rest) = copy.copy(owner), path
    inner = getattr(owner, step) if isinstance(owner, eqx.Module) else owner[step]
    set_part(new, step, with_part(inner, rest, part))
    return new


class T5Config:
    def __init__(
        self,
        vocab_size=32128,
        d_model=512,
        d_kv=64,
        d_ff=2048,
        num_layers=6,
        num_heads=8,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        dropout_rate=0.1,
        layer_norm_epsilon=1e-6,
        feed_forward_proj="relu",
    ):
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.d_kv = d_kv
        self.d_ff = d_ff
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.relative_attention_num_buckets = relative_attention_num_buckets
        self.relative_attention_max_distance = relative_attention_max_distance
        self.dropout_rate = dropout_rate
        self.layer_norm_epsilon = layer_norm_epsilon
        self.feed_forward_proj = feed_forward_proj
        self.is_decoder = False


class T5LayerNorm(eqx.Module):
    weight: jax.Array
    variance_epsilon: float = eqx.field(static=True)

    def __init__(self, hidden_size, eps=1e-06):
        """Construct a layernorm module in the T5 style. No bias and no subtraction of mean."""
        self.weight = jnp.ones((hidden_size,))
        self.variance_epsilon = eps

    def __call__(self, hidden_states):
        # T5 uses a layer_norm which only scales and doesn't shift, which is also known as Root Mean
        # Square Layer Normalization, thus variance is calculated w/o mean and there is no bias.
        variance = (hidden_states.astype(jnp.float32) ** 2).mean(axis=-1, keepdims=True)
        hidden_states = hidden_states * jax.lax.rsqrt(variance + self.variance_epsilon)

        # convert into half-precision if necessary
        if self.weight.dtype in [jnp.float16, jnp.bfloat16]:
            hidden_states = hidden_states.astype(self.weight.dtype)

        return self.weight * hidden_states


class T5DenseActDense(eqx.Module):
    wi: Linear
    wo: Linear
    dropout: eqx.nn.Dropout
    act: Callable

    def __init__(self, config, *, key):
        keys = Keys(key)
        self.wi = Linear(config.d_model, config.d_ff, bias=False, key=keys())
        self.wo = Linear(config.d_ff, config.d_model, bias=False, key=keys())
        self.dropout = eqx.nn.Dropout(config.dropout_rate)
        self.act = (
            jax.nn.relu
            if config.feed_forward_proj == "relu"
            else partial(jax.nn.gelu, approximate=False)
        )

    def __call__(self, hidden_states, *, key=None):
        keys = Keys(key)
        hidden_states = self.wi(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.dropout(hidden_states, key=keys())
        hidden_states = self.wo(hidden_states)
        return hidden_states


class T5LayerFF(eqx.Module):
    DenseReluDense: T5DenseActDense
    layer_norm: T5LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config, *, key):
        keys = Keys(key)
        self.DenseReluDense = T5DenseActDense(config, key=keys())
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = eqx.nn.Dropout(config.dropout_rate)

    def __call__(self, hidden_states, *, key=None):
        keys = Keys(key)
        forwarded_states = self.layer_norm(hidden_states)
        forwarded_states = self.DenseReluDense(forwarded_states, key=keys())
        hidden_states = hidden_states + self.dropout(forwarded_states, key=keys())
        return hidden_states


class T5Attention(eqx.Module):
    is_decoder: bool = eqx.field(static=True)
    has_relative_attention_bias: bool = eqx.field(static=True)
    relative_attention_num_buckets: int = eqx.field(static=True)
    relative_attention_max_distance: int = eqx.field(static=True)
    d_model: int = eqx.field(static=True)
    key_value_proj_dim: int = eqx.field(static=True)
    n_heads: int = eqx.field(static=True)
    inner_dim: int = eqx.field(static=True)
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    dropout: eqx.nn.Dropout
    relative_attention_bias: Embedding = None
    inference: bool  # set by eqx.nn.inference_mode

    def __init__(self, config, has_relative_attention_bias=False, *, key):
        keys = Keys(key)
        self.is_decoder = config.is_decoder
        self.has_relative_attention_bias = has_relative_attention_bias
        self.relative_attention_num_buckets = config.relative_attention_num_buckets
        self.relative_attention_max_distance = config.relative_attention_max_distance
        self.d_model = config.d_model
        self.key_value_proj_dim = config.d_kv
        self.n_heads = config.num_heads
        self.inner_dim = self.n_heads * self.key_value_proj_dim

        self.q = Linear(self.d_model, self.inner_dim, bias=False, key=keys())
        self.k = Linear(self.d_model, self.inner_dim, bias=False, key=keys())
        self.v = Linear(self.d_model, self.inner_dim, bias=False, key=keys())
        self.o = Linear(self.inner_dim, self.d_model, bias=False, key=keys())
        self.dropout = eqx.nn.Dropout(config.dropout_rate)

        if self.has_relative_attention_bias:
            self.relative_attention_bias = Embedding(
                self.relative_attention_num_buckets, self.n_heads, key=keys()
            )
        self.inference = False

    @staticmethod
    def _relative_position_bucket(
        relative_position, bidirectional=True, num_buckets=32, max_distance=128
    ):
        relative_buckets = 0
        if bidirectional:
            num_buckets //= 2
            relative_buckets += (relative_position > 0).astype(jnp.int32) * num_buckets
            relative_position = jnp.abs(relative_position)
        else:
            relative_position = -jnp.minimum(relative_position, jnp.zeros_like(relative_position))
        # now relative_position is in the range [0, inf)

        # half of the buckets are for exact increments in positions
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact

        # The other half of the buckets are for logarithmically bigger bins in positions
        relative_position_if_large = max_exact + (
            jnp.log(relative_position.astype(jnp.float32) / max_exact)
            / math.log(max_distance / max_exact)
            * (num_buckets - max_exact)
        ).astype(jnp.int32)
        relative_position_if_large = jnp.minimum(
            relative_position_if_large, jnp.full_like(relative_position_if_large, num_buckets - 1)
        )

        relative_buckets += jnp.where(is_small, relative_position, relative_position_if_large)
        return relative_buckets

    def compute_bias(self, query_length, key_length):
        """Compute binned relative position bias"""
        context_position = jnp.arange(query_length)[:, None]
        memory_position = jnp.arange(key_length)[None, :]
        relative_position = memory_position - context_position  # shape (query_length, key_length)
        relative_position_bucket = self._relative_position_bucket(
            relative_position,
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        # shape (query_length, key_length, num_heads)
        values = self.relative_attention_bias(relative_position_bucket)
        values = values.transpose(2, 0, 1)[None]  # (1, num_heads, query_length, key_length)
        return values

    def __call__(
        self, hidden_states, mask=None, key_value_states=None, position_bias=None, *, key=None
    ):
        keys = Keys(key)
        batch_size, seq_length = hidden_states.shape[:2]

        query_states = self.q(hidden_states)
        query_states = query_states.reshape(
            batch_size, -1, self.n_heads, self.key_value_proj_dim
        ).swapaxes(1, 2)

        is_cross_attention = key_value_states is not None
        current_states = key_value_states if is_cross_attention else hidden_states
        key_states = self.k(current_states)
        value_states = self.v(current_states)
        key_states = key_states.reshape(
            batch_size, -1, self.n_heads, self.key_value_proj_dim
        ).swapaxes(1, 2)
        value_states = value_states.reshape(
            batch_size, -1, self.n_heads, self.key_value_proj_dim
        ).swapaxes(1, 2)

        # compute scores, equivalent of torch.einsum("bnqd,bnkd->bnqk", query_states, key_states)
        scores = query_states @ key_states.swapaxes(3, 2)

        if position_bias is None:
            key_length = key_states.shape[-2]
            if not self.has_relative_attention_bias:
                position_bias = jnp.zeros((1, self.n_heads, seq_length, key_length))
            else:
                position_bias = self.compute_bias(seq_length, key_length)

            if mask is not None:
                position_bias = position_bias + mask[:, :, :, :key_length]

        scores += position_bias

        # (batch_size, n_heads, seq_length, key_length)
        attn_weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(scores.dtype)
        attn_weights = eqx.nn.Dropout(self.dropout.p)(
            attn_weights, key=keys(), inference=self.inference
        )

        attn_output = attn_weights @ value_states

        attn_output = attn_output.swapaxes(1, 2)
        attn_output = attn_output.reshape(batch_size, -1, self.inner_dim)
        attn_output = self.o(attn_output)

        return attn_output, position_bias


class T5LayerSelfAttention(eqx.Module):
    SelfAttention: T5Attention
    layer_norm: T5LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config, has_relative_attention_bias=False, *, key):
        keys = Keys(key)
        self.SelfAttention = T5Attention(
            config, has_relative_attention_bias=has_relative_attention_bias, key=keys()
        )
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = eqx.nn.Dropout(config.dropout_rate)

    def __call__(self, hidden_states, attention_mask=None, position_bias=None, *, key=None):
        keys = Keys(key)
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output = self.SelfAttention(
            normed_hidden_states, mask=attention_mask, position_bias=position_bias, key=keys()
        )
        hidden_states = hidden_states + self.dropout(attention_output[0], key=keys())
        outputs = (hidden_states,) + attention_output[1:]
        return outputs


class T5LayerCrossAttention(eqx.Module):
    EncDecAttention: T5Attention
    layer_norm: T5LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config, *, key):
        keys = Keys(key)
        self.EncDecAttention = T5Attention(config, has_relative_attention_bias=False, key=keys())
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = eqx.nn.Dropout(config.dropout_rate)

    def __call__(
        self, hidden_states, key_value_states, attention_mask=None, position_bias=None, *, key=None
    ):
        keys = Keys(key)
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output = self.EncDecAttention(
            normed_hidden_states,
            mask=attention_mask,
            key_value_states=key_value_states,
            position_bias=position_bias,
            key=keys(),
        )
        layer_output = hidden_states + self.dropout(attention_output[0], key=keys())
        outputs = (layer_output,) + attention_output[1:]
        return outputs


class T5Block(eqx.Module):
    is_decoder: bool = eqx.field(static=True)
    layer: list

    def __init__(self, config, has_relative_attention_bias=False, *, key):
        keys = Keys(key)
        self.is_decoder = config.is_decoder
        self.layer = []
        self.layer.append(
            T5LayerSelfAttention(
                config, has_relative_attention_bias=has_relative_attention_bias, key=keys()
            )
        )
        if self.is_decoder:
            self.layer.append(T5LayerCrossAttention(config, key=keys()))

        self.layer.append(T5LayerFF(config, key=keys()))

    def __call__(
        self,
        hidden_states,
        attention_mask=None,
        position_bias=None,
        encoder_hidden_states=None,
        encoder_decoder_position_bias=None,
        *,
        key=None,
    ):
        keys = Keys(key)
        self_attention_outputs = self.layer[0](
            hidden_states, attention_mask=attention_mask, position_bias=position_bias, key=keys()
        )
        hidden_states, position_bias = self_attention_outputs[:2]

        do_cross_attention = self.is_decoder and encoder_hidden_states is not None
        if do_cross_attention:
            cross_attention_outputs = self.layer[1](
                hidden_states,
                key_value_states=encoder_hidden_states,
                position_bias=encoder_decoder_position_bias,
                key=keys(),
            )
            hidden_states, encoder_decoder_position_bias = cross_attention_outputs[:2]

        # Apply Feed Forward layer
        hidden_states = self.layer[-1](hidden_states, key=keys())

        return hidden_states, position_bias, encoder_decoder_position_bias


class T5Stack(eqx.Module):
    embed_tokens: Embedding
    is_decoder: bool = eqx.field(static=True)
    block: list[T5Block]
    final_layer_norm: T5LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config, embed_tokens=None, *, key):
        keys = Keys(key)
        self.embed_tokens = embed_tokens
        self.is_decoder = config.is_decoder

        self.block = [
            T5Block(config, has_relative_attention_bias=bool(i == 0), key=keys())
            for i in range(config.num_layers)
        ]
        self.final_layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = eqx.nn.Dropout(config.dropout_rate)

    def __call__(self, input_ids, encoder_hidden_states=None, *, key=None):
        keys = Keys(key)
        inputs_embeds = self.embed_tokens(input_ids)
        batch_size, seq_length = input_ids.shape

        if self.is_decoder:
            causal_mask = jnp.tril(jnp.ones((seq_length, seq_length)))[None, None, :, :]
            extended_attention_mask = (1.0 - causal_mask) * float(
                jnp.finfo(inputs_embeds.dtype).min
            )
        else:
            extended_attention_mask = None
        position_bias = None
        encoder_decoder_position_bias = None

        hidden_states = self.dropout(inputs_embeds, key=keys())

        for i, layer_module in enumerate(self.block):
            layer_outputs = layer_module(
                hidden_states,
                attention_mask=extended_attention_mask,
                position_bias=position_bias,
                encoder_hidden_states=encoder_hidden_states,
                encoder_decoder_position_bias=encoder_decoder_position_bias,
                key=keys(),
            )
            hidden_states, position_bias, encoder_decoder_position_bias = layer_outputs

        hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = self.dropout(hidden_states, key=keys())
        return hidden_states


class T5ForConditionalGeneration(eqx.Module):
    config: Any = eqx.field(static=True)
    model_dim: int = eqx.field(static=True)
    shared: Embedding
    encoder: T5Stack
    decoder: T5Stack
    lm_head: Linear
    shared_parts: tuple = eqx.field(static=True)

    def __init__(self, config, *, key):
        keys = Keys(key)
        self.config = config
        self.model_dim = config.d_model

        self.shared = Embedding(config.vocab_size, config.d_model, key=keys())

        encoder_config = copy.deepcopy(config)
        encoder_config.is_decoder = False
        self.encoder = T5Stack(encoder_config, self.shared, key=keys())

        decoder_config = copy.deepcopy(config)
        decoder_config.is_decoder = True
        self.decoder = T5Stack(decoder_config, self.shared, key=keys())

        self.lm_head = Linear(config.d_model, config.vocab_size, bias=False, key=keys())
        self.shared_parts = hide_shared(self)

    def __call__(self, input_ids, decoder_input_ids, *, key=None):
        keys = Keys(key)
        self = show_shared(self)
        # Encode if needed (training, first prediction pass)
        hidden_states = self.encoder(input_ids, key=keys())

        # Decode
        sequence_output = self.decoder(
            decoder_input_ids, encoder_hidden_states=hidden_states, key=keys()
        )

        # Rescale output before projecting on vocab
        sequence_output = sequence_output * self.model_dim ** (-0.5)

        lm_logits = self.lm_head(sequence_output)
        return lm_logits


TIED = {
    "decoder.embed_tokens.weight": "shared.weight",
    "encoder.embed_tokens.weight": "shared.weight",
}  # names in the source's state -> those here


def load_weights(model, state, strict=True):
    """Returns a model with the arrays of the source's state dict.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    given = {TIED.get(name, name): array for name, array in state.items()}
    known, missing = set(), []

    def load(path, array):
        name = name_in_source(model, path)
        name = TIED.get(name, name)
        known.add(name)
        if name not in given:
            missing.extend([] if name is None else [name])
            return array
        if jnp.shape(given[name]) != array.shape:
            raise ValueError(f"{name}: {jnp.shape(given[name])} instead of {array.shape}")
        return jnp.asarray(given[name], array.dtype)

    arrays, rest = eqx.partition(model, eqx.is_array)
    filled = eqx.combine(jax.tree_util.tree_map_with_path(load, arrays), rest)
    left = [x for x in given if x not in known and not x.endswith("num_batches_tracked")]
    if strict and (missing or left):
        raise ValueError(f"missing: {missing}; left over: {left}")
    return filled


def source_state(model):
    """Returns the arrays of a model by their names in the source."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    named = [(name_in_source(model, path), array) for path, array in leaves]
    state = {name: array for name, array in named if name is not None}
    return state | {second: state[first] for second, first in TIED.items()}
