"""LM for PyTorch, transcribed from models.equinox_repositories.lm"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Dropout(nn.Dropout):
    """Dropout that a call may leave out."""

    def __init__(self, p=0.5, inference=False):
        super().__init__(p)
        self.training = not inference

    def forward(self, x, inference=None):
        return F.dropout(x, self.p, self.training if inference is None else not inference)


class MultiheadAttention(nn.Module):
    """Attention of several heads between two sequences."""

    def __init__(
        self,
        num_heads,
        query_size,
        key_size=None,
        value_size=None,
        output_size=None,
        qk_size=None,
        vo_size=None,
        use_query_bias=False,
        use_key_bias=False,
        use_value_bias=False,
        use_output_bias=False,
        dropout_p=0.0,
        inference=False,
    ):
        super().__init__()
        self.num_heads = num_heads
        qk_size, vo_size = qk_size or query_size // num_heads, vo_size or query_size // num_heads
        self.query_proj = nn.Linear(query_size, num_heads * qk_size, use_query_bias)
        self.key_proj = nn.Linear(key_size or query_size, num_heads * qk_size, use_key_bias)
        self.value_proj = nn.Linear(value_size or query_size, num_heads * vo_size, use_value_bias)
        self.output_proj = nn.Linear(
            num_heads * vo_size, output_size or query_size, use_output_bias
        )
        self.dropout = Dropout(dropout_p, inference)

    def forward(self, query, key_, value, mask=None, *, inference=None):
        q, k, v = (
            part(x).reshape(x.shape[0], self.num_heads, -1)
            for part, x in (
                (self.query_proj, query),
                (self.key_proj, key_),
                (self.value_proj, value),
            )
        )
        weights = torch.einsum("qhd,khd->hqk", q / math.sqrt(q.shape[-1]), k)
        if mask is not None:
            weights = torch.where(mask, weights, torch.finfo(weights.dtype).min)
        weights = self.dropout(weights.softmax(-1), inference)
        return self.output_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


def as_part(item):
    """Returns a module for a module, a function, or a list or dict of such."""
    if isinstance(item, list | tuple):
        return Parts(item)
    if isinstance(item, dict):
        return nn.ModuleDict({name: as_part(part) for name, part in item.items()})
    return item if isinstance(item, nn.Module) else Function(item)


class Parts(nn.ModuleList):
    """A list of layers and functions."""

    def __init__(self, parts=()):
        super().__init__(map(as_part, parts))

    def append(self, part):
        return super().append(as_part(part))


def named_arrays(module, path=()):
    """Yields the name of each array in the source, the tensor, and its axes there."""
    names = getattr(module, "source_arrays", {})
    for key, tensor in module.state_dict(keep_vars=True).items():
        if "." not in key:
            name, axes = names.get(key, (key, None))
            yield ".".join((*path, name)), tensor, axes
    inner = (*path, *getattr(module, "source_path", ()))
    for key, part in module.named_children():
        yield from named_arrays(part, (*inner, key))


class Function(nn.Module):
    """A function in the place of a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class AttentionBlock(nn.Module):
    """A single attention block, whose dropout is off unless a call enables it."""

    def __init__(self, size, intermediate, heads, rate):
        super().__init__()
        self.attention = MultiheadAttention(
            num_heads=heads, query_size=size, use_output_bias=True, dropout_p=rate
        )
        self.layernorm = nn.LayerNorm(normalized_shape=size)
        self.mlp = nn.Linear(size, intermediate)
        self.output = nn.Linear(intermediate, size)
        self.final = nn.LayerNorm(normalized_shape=size)
        self.dropout = Dropout(rate)

    def forward(self, inputs):
        length = inputs.shape[0]
        mask = torch.ones((length, length), dtype=torch.bool, device=inputs.device).tril()
        result = self.attention(inputs, inputs, inputs, mask=mask)
        result = self.layernorm(result + inputs)
        hidden = F.gelu(self.mlp(result), approximate="tanh")
        hidden = self.dropout(self.output(hidden))
        return self.final(hidden + result)


class LM(nn.Module):
    def __init__(self, vocab, max_length, size, intermediate, depth, heads, rate):
        super().__init__()
        tkey, pkey, hkey, lkey = range(4)
        self.token_embedder = nn.Embedding(vocab, size)
        self.position_embedder = nn.Embedding(max_length, size)
        self.layers = Parts([])
        for layer_key in range(depth):
            self.layers.append(AttentionBlock(size, intermediate, heads, rate))
        self.head = nn.Linear(size, vocab, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.token_embedder(tokens) + self.position_embedder(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def load_weights(model, state, strict=True):
    """Fills a model with the arrays of the source's state, by name; returns it.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    arrays, filled = dict(state), set()
    for name, tensor, axes in named_arrays(model):
        if name in arrays:
            array = arrays.pop(name)
            array = array if isinstance(array, torch.Tensor) else torch.tensor(array)
            array = array if axes is None else array.permute(axes)
            if array.shape != tensor.shape:
                raise ValueError(f"{name}: {tuple(array.shape)} instead of {tuple(tensor.shape)}")
            with torch.no_grad():
                tensor.copy_(array)
            filled.add(id(tensor))
    missing = [name for name, tensor, _ in named_arrays(model) if id(tensor) not in filled]
    if strict and (missing or arrays):
        raise ValueError(f"missing: {missing}; left over: {[*arrays]}")
    return model


def source_state(model):
    """Returns the arrays of a model by their names in the source, in its layouts."""
    state = {}
    for name, tensor, axes in named_arrays(model):
        back = axes and [axes.index(axis) for axis in range(tensor.ndim)]
        state[name] = tensor.detach().permute(back) if back else tensor.detach()
    return state
