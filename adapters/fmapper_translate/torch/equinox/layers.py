"""Layers that files for PyTorch have beside an Equinox model's classes, with Equinox's names."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fmapper_translate.torch.layers import Function, pad, pads_of, repeat


class Parts(nn.ModuleList):
    """A list of layers and functions."""

    def __init__(self, parts=()):
        super().__init__(map(as_part, parts))

    def append(self, part):
        return super().append(as_part(part))


def as_part(item):
    """Returns a module for a module, a function, or a list or dict of such."""
    if isinstance(item, list | tuple):
        return Parts(item)
    if isinstance(item, dict):
        return nn.ModuleDict({name: as_part(part) for name, part in item.items()})
    return item if isinstance(item, nn.Module) else Function(item)


class Sequential(Parts):
    """Layers and functions that are called one after the other."""

    source_path = ("layers",)

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


class Conv(nn.Module):
    """A convolution of one example with Equinox's arguments, initial values and biases."""

    def __init__(
        self, num_spatial_dims, in_channels, out_channels, kernel_size, stride=1, padding=0,
        dilation=1, groups=1, use_bias=True, padding_mode="ZEROS",
    ):  # fmt: skip
        super().__init__()
        rank, self.groups, self.padding = num_spatial_dims, groups, padding
        self.kernel_size, self.stride = repeat(kernel_size, rank), repeat(stride, rank)
        self.dilation, self.padding_mode = repeat(dilation, rank), padding_mode.upper()
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        limit = 1 / math.sqrt(math.prod(shape[1:]))
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-limit, limit))
        column = torch.empty(out_channels, *(1,) * rank).uniform_(-limit, limit)
        self.bias = nn.Parameter(column) if use_bias else None

    def forward(self, x):
        modes = {"ZEROS": "constant", "REPLICATE": "replicate", "CIRCULAR": "circular"}
        pads = pads_of(x.shape[1:], self.kernel_size, self.stride, self.padding, self.dilation)
        flat = [size for pair in reversed(pads) for size in pair]
        x = F.pad(x[None], flat, modes.get(self.padding_mode, "reflect"))
        conv = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        y = conv(x, self.weight, None, self.stride, 0, self.dilation, self.groups)[0]
        return y if self.bias is None else y + self.bias


class ConvTranspose(Conv):
    """A transposed convolution of one example with Equinox's arguments and initial values."""

    def __init__(
        self, num_spatial_dims, in_channels, out_channels, kernel_size, stride=1,
        output_padding=0, padding=0, dilation=1, groups=1, use_bias=True,
    ):  # fmt: skip
        super().__init__(
            num_spatial_dims, in_channels, out_channels, kernel_size, stride, padding, dilation,
            groups, use_bias,
        )  # fmt: skip
        self.output_padding = repeat(output_padding, num_spatial_dims)

    def forward(self, x):
        conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[x.ndim - 2]
        weight = self.weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        weight = weight.flip(tuple(range(2, x.ndim + 1)))  # which the source is not
        y = conv(x[None], weight, None, self.stride, 0, 0, self.groups, self.dilation)
        y = pad(y, self.crops())[0]
        return y if self.bias is None else y + self.bias

    def crops(self):
        """Returns by how much the ends of each dimension grow; less than 0 where they shrink."""
        if isinstance(self.padding, str) and self.padding != "VALID":
            sizes = zip(
                self.kernel_size, self.stride, self.output_padding, self.dilation, strict=True
            )
            sums = [d * (k - 1) - s + a + 1 for k, s, a, d in sizes]
            lower = self.padding == "SAME_LOWER"
            befores = [(max(total, 0) + lower) // 2 for total in sums]
            return [
                (-before, before - max(total, 0) + max(-total, 0))
                for before, total in zip(befores, sums, strict=True)
            ]
        pairs = [(0, 0)] * len(self.stride)
        if self.padding != "VALID":
            pairs = [repeat(p, 2) for p in repeat(self.padding, len(self.stride))]
        more = zip(pairs, self.output_padding, strict=True)
        return [(-before, size - after) for (before, after), size in more]


class Cell(nn.Module):
    """A step of a recurrent layer with Equinox's arguments and initial values."""

    gates = 4

    def __init__(self, input_size, hidden_size, use_bias=True):
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        limit, size = 1 / math.sqrt(hidden_size), self.gates * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(size, input_size).uniform_(-limit, limit))
        self.weight_hh = nn.Parameter(torch.empty(size, hidden_size).uniform_(-limit, limit))
        self.bias = nn.Parameter(torch.empty(size).uniform_(-limit, limit)) if use_bias else None


class LSTMCell(Cell):
    """A step of an LSTM."""

    def forward(self, input, hidden):
        h, c = hidden
        gates = F.linear(input, self.weight_ih, self.bias) + F.linear(h, self.weight_hh)
        i, f, g, o = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class GRUCell(Cell):
    """A step of a GRU."""

    gates = 3

    def __init__(self, input_size, hidden_size, use_bias=True):
        super().__init__(input_size, hidden_size, use_bias)
        limit = 1 / math.sqrt(hidden_size)
        drawn = torch.empty(hidden_size).uniform_(-limit, limit)
        self.bias_n = nn.Parameter(drawn) if use_bias else None

    def forward(self, input, hidden):
        i_r, i_z, i_n = F.linear(input, self.weight_ih, self.bias).chunk(3, -1)
        h_r, h_z, h_n = F.linear(hidden, self.weight_hh).chunk(3, -1)
        h_n = h_n if self.bias_n is None else h_n + self.bias_n
        new = torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)
        return new + torch.sigmoid(i_z + h_z) * (hidden - new)


class RMSNorm(nn.Module):
    """Division of an array by its size, with a weight and a bias."""

    def __init__(self, shape, eps=1e-5, use_weight=True, use_bias=True):
        super().__init__()
        self.shape, self.eps = repeat(shape, 1), eps
        self.weight = nn.Parameter(torch.ones(self.shape)) if use_weight else None
        self.bias = nn.Parameter(torch.zeros(self.shape)) if use_bias else None

    def forward(self, x):
        y = F.rms_norm(x, self.shape, self.weight, self.eps)
        return y if self.bias is None else y + self.bias


class WeightNorm(nn.Module):
    """A layer one of whose arrays has sizes of its own."""

    def __init__(self, layer, weight_name="weight", axis=0):
        super().__init__()
        self.layer, self.weight_name, self.axis = layer, weight_name, axis
        self.g = nn.Parameter(self.norm(getattr(layer, weight_name)).detach())

    def norm(self, v):
        kept = [] if self.axis is None else [self.axis % v.ndim]
        return torch.linalg.vector_norm(
            v, dim=[dim for dim in range(v.ndim) if dim not in kept], keepdim=True
        )

    def forward(self, x):
        v = getattr(self.layer, self.weight_name)
        weight = {self.weight_name: v * self.g / self.norm(v)}
        return torch.func.functional_call(self.layer, weight, (x,))


class Shared(nn.Module):
    """Layers of which some have an array of others."""

    def __init__(self, pytree, where, get):
        super().__init__()
        self.pytree = nn.ModuleList(pytree)
        array, shared = where(self.pytree), get(self.pytree)
        for part in self.pytree.modules():
            for name, known in part._parameters.items():
                if known is array:
                    part._parameters[name] = shared

    def forward(self):
        return self.pytree


class PReLU(nn.Module):
    """A rectifier whose slope below 0 is learned."""

    def __init__(self, init_alpha=0.25):
        super().__init__()
        self.negative_slope = nn.Parameter(torch.as_tensor(init_alpha))

    def forward(self, x):
        return torch.where(x >= 0, x, self.negative_slope * x)


class RotaryPositionalEmbedding(nn.Module):
    """Turns the features of each place of a sequence by angles that grow with the place."""

    def __init__(self, embedding_size, theta=10_000.0):
        super().__init__()
        self.embedding_size, self.theta = embedding_size, theta

    def forward(self, x):
        steps = torch.arange(0, self.embedding_size, 2, device=x.device) / self.embedding_size
        angles = torch.outer(torch.arange(x.shape[-2], device=x.device), self.theta**-steps)
        cos, sin = angles.cos().tile(1, 2), angles.sin().tile(1, 2)
        first, second = x.chunk(2, -1)
        return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


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
