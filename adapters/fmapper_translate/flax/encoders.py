"""PyTorch's own transformer in files for Flax NNX."""

from __future__ import annotations

from functools import partial

from flax import nnx

from fmapper_translate.flax.layers import LayerNorm, Linear, MultiheadAttention, clone
from fmapper_translate.flax.weights import initialize
from fmapper_translate.targets.functions import square_subsequent_mask


class TransformerEncoderLayer(nnx.Module):
    """Attention and a perceptron, with PyTorch's arguments."""

    attends_to_memory = False

    def __init__(
        self, d_model, nhead, dim_feedforward=2048, dropout=0.1, activation=nnx.relu,
        layer_norm_eps=1e-5, batch_first=False, norm_first=False, bias=True, *, rngs,
    ):  # fmt: skip
        known = {"relu": nnx.relu, "gelu": partial(nnx.gelu, approximate=False)}
        self.activation = known[activation] if isinstance(activation, str) else activation
        self.norm_first = norm_first
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, rngs=rngs
        )
        if self.attends_to_memory:
            self.multihead_attn = MultiheadAttention(
                d_model, nhead, dropout, bias, batch_first=batch_first, rngs=rngs
            )
            self.norm3 = LayerNorm(d_model, layer_norm_eps, bias=bias, rngs=rngs)
            self.dropout3 = nnx.Dropout(dropout, rngs=rngs)
        self.linear1 = Linear(d_model, dim_feedforward, bias, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.linear2 = Linear(dim_feedforward, d_model, bias, rngs=rngs)
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias, rngs=rngs)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias, rngs=rngs)
        self.dropout1 = nnx.Dropout(dropout, rngs=rngs)
        self.dropout2 = nnx.Dropout(dropout, rngs=rngs)

    def add(self, x, part, norm, dropout):
        if self.norm_first:
            return x + dropout(part(norm(x)))
        return norm(x + dropout(part(x)))

    def feed(self, x):
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def __call__(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        def attend(x):
            return self.self_attn(
                x, x, x, src_key_padding_mask, False, src_mask, is_causal=is_causal
            )[0]

        x = self.add(src, attend, self.norm1, self.dropout1)
        return self.add(x, self.feed, self.norm2, self.dropout2)


class TransformerDecoderLayer(TransformerEncoderLayer):
    """Attention to what is before and to a memory, and a perceptron."""

    attends_to_memory = True

    def __call__(
        self, tgt, memory, tgt_mask=None, memory_mask=None, tgt_key_padding_mask=None,
        memory_key_padding_mask=None, tgt_is_causal=False, memory_is_causal=False,
    ):  # fmt: skip
        def attend(x):
            return self.self_attn(
                x, x, x, tgt_key_padding_mask, False, tgt_mask, is_causal=tgt_is_causal
            )[0]

        def remember(x):
            keys = memory_key_padding_mask
            return self.multihead_attn(
                x, memory, memory, keys, False, memory_mask, is_causal=memory_is_causal
            )[0]

        x = self.add(tgt, attend, self.norm1, self.dropout1)
        x = self.add(x, remember, self.norm2, self.dropout2)
        return self.add(x, self.feed, self.norm3, self.dropout3)


class TransformerEncoder(nnx.Module):
    """Copies of a layer that are called one after the other, and a norm."""

    def __init__(
        self, encoder_layer, num_layers, norm=None, enable_nested_tensor=True, mask_check=True,
        *, rngs,
    ):  # fmt: skip
        self.layers = nnx.List([clone(encoder_layer, rngs=rngs) for _ in range(num_layers)])
        self.norm = norm

    def __call__(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, is_causal)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(nnx.Module):
    """Copies of a layer that are called one after the other, and a norm."""

    def __init__(self, decoder_layer, num_layers, norm=None, *, rngs):
        self.layers = nnx.List([clone(decoder_layer, rngs=rngs) for _ in range(num_layers)])
        self.norm = norm

    def __call__(self, tgt, memory, *masks, **named):
        for layer in self.layers:
            tgt = layer(tgt, memory, *masks, **named)
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(nnx.Module):
    """An encoder, and a decoder that attends to its result."""

    generate_square_subsequent_mask = staticmethod(square_subsequent_mask)

    def __init__(
        self, d_model=512, nhead=8, num_encoder_layers=6, num_decoder_layers=6,
        dim_feedforward=2048, dropout=0.1, activation=nnx.relu, custom_encoder=None,
        custom_decoder=None, layer_norm_eps=1e-5, batch_first=False, norm_first=False, bias=True,
        *, rngs,
    ):  # fmt: skip
        given = (
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first,
            norm_first, bias,
        )  # fmt: skip
        norms = [LayerNorm(d_model, layer_norm_eps, bias=bias, rngs=rngs) for _ in range(2)]
        self.encoder = custom_encoder or TransformerEncoder(
            TransformerEncoderLayer(*given, rngs=rngs), num_encoder_layers, norms[0], rngs=rngs
        )
        self.decoder = custom_decoder or TransformerDecoder(
            TransformerDecoderLayer(*given, rngs=rngs), num_decoder_layers, norms[1], rngs=rngs
        )
        for _, array in nnx.iter_graph([self.encoder, self.decoder]):
            if isinstance(array, nnx.Param) and array.ndim > 1:
                initialize(array, nnx.initializers.xavier_uniform(), rngs)

    def __call__(
        self, src, tgt, src_mask=None, tgt_mask=None, memory_mask=None, src_key_padding_mask=None,
        tgt_key_padding_mask=None, memory_key_padding_mask=None, src_is_causal=None,
        tgt_is_causal=None, memory_is_causal=False,
    ):  # fmt: skip
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        return self.decoder(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            tgt_is_causal,
            memory_is_causal,
        )
