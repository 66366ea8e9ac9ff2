"""Layers that files for PyTorch have beside an Equinox model's classes, with Equinox's names."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Parts(nn.ModuleList):
    """A list of layers and functions."""

    def __init__(self, parts):
        super().__init__(item if isinstance(item, nn.Module) else Function(item) for item in parts)


class Function(nn.Module):
    """A function in the place of a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Sequential(Parts):
    """Layers and functions that are called one after the other."""

    source_path = ("layers",)

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


class WithColumn(nn.Module):
    """A convolution whose bias is a column of channels."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            ones = (1,) * len(self.kernel_size)
            self.bias = nn.Parameter(self.bias.detach().reshape(-1, *ones))

    def forward(self, x):
        bias = None if self.bias is None else self.bias.flatten()
        conv = F.conv1d if len(self.kernel_size) == 1 else F.conv2d
        return conv(x, self.weight, bias, self.stride, self.padding, self.dilation, self.groups)


class Conv1d(WithColumn, nn.Conv1d):
    """See `WithColumn`."""


class Conv2d(WithColumn, nn.Conv2d):
    """See `WithColumn`."""


class Dropout(nn.Dropout):
    """Dropout that a call may leave out."""

    def __init__(self, p=0.5, inference=False):
        super().__init__(p)
        self.training = not inference

    def forward(self, x, inference=None):
        return F.dropout(x, self.p, self.training if inference is None else not inference)


class GroupNorm(nn.GroupNorm):
    """Normalisation of groups of the channels of one example."""

    def forward(self, x):
        return super().forward(x.unsqueeze(0)).squeeze(0)


class MLP(nn.Module):
    """Linear layers with activations."""

    def __init__(
        self, in_size, out_size, width_size, depth, activation=F.relu, final_activation=None,
        use_bias=True, use_final_bias=True,
    ):  # fmt: skip
        super().__init__()
        sizes = [in_size, *[width_size] * depth, out_size]
        self.layers = nn.ModuleList(
            nn.Linear(sizes[i], sizes[i + 1], use_final_bias if i == depth else use_bias)
            for i in range(depth + 1)
        )
        self.activation, self.final_activation = activation, final_activation

    def forward(self, x):
        *layers, last = self.layers
        for layer in layers:
            x = self.activation(layer(x))
        x = last(x)
        return x if self.final_activation is None else self.final_activation(x)


class MultiheadAttention(nn.Module):
    """Attention of several heads between two sequences."""

    def __init__(
        self, num_heads, query_size, key_size=None, value_size=None, output_size=None,
        qk_size=None, vo_size=None, use_query_bias=False, use_key_bias=False, use_value_bias=False,
        use_output_bias=False, dropout_p=0.0, inference=False,
    ):  # fmt: skip
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
                (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value),
            )
        )  # fmt: skip
        weights = torch.einsum("qhd,khd->hqk", q / math.sqrt(q.shape[-1]), k)
        if mask is not None:
            weights = torch.where(mask, weights, torch.finfo(weights.dtype).min)
        weights = self.dropout(weights.softmax(-1), inference)
        return self.output_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


def vmap(fun, in_axes=0, out_axes=0):
    """Maps a function over a dimension of its arguments, with random numbers for each element."""
    return torch.vmap(fun, in_axes, out_axes, randomness="different")
