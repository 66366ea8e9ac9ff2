"""Layers that files for PyTorch have beside the model's classes, with Flax's arguments.

A file takes the source of those that it names. Channels are last, as in the source.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fmapper_translate.torch.weights import (
    fill,
    he_uniform,
    lecun_normal,
    variance_scaling,
    zeros_init,
)


def repeat(size, count):
    """Returns a size for each dimension, where one may stand for all."""
    return (size,) * count if isinstance(size, int) else tuple(size)


class Linear(nn.Linear):
    """A linear layer with Flax's arguments and initial values."""

    source_arrays = {"weight": ("kernel", (1, 0))}

    def __init__(self, in_features, out_features, use_bias=True, kernel_init=None, bias_init=None):
        super().__init__(in_features, out_features, bias=use_bias)
        fill(self, "weight", kernel_init or lecun_normal())
        fill(self, "bias", bias_init or zeros_init())


class LinearGeneral(nn.Module):
    """A linear layer over several dimensions."""

    source_arrays = {"weight": ("kernel", None)}

    def __init__(
        self, in_features, out_features, axis=-1, use_bias=True, kernel_init=None, bias_init=None
    ):
        super().__init__()
        inner, outer = repeat(in_features, 1), repeat(out_features, 1)
        self.axis = repeat(axis, 1)
        drawn = (kernel_init or lecun_normal())((math.prod(inner), math.prod(outer)))
        self.weight = nn.Parameter(drawn.reshape(*inner, *outer))
        self.bias = nn.Parameter((bias_init or zeros_init())(outer)) if use_bias else None

    def forward(self, x):
        y = torch.tensordot(x, self.weight, (self.axis, tuple(range(len(self.axis)))))
        return y if self.bias is None else y + self.bias


class Einsum(nn.Module):
    """A product by subscripts, with Flax's arguments and initial values."""

    source_arrays = {"weight": ("kernel", None)}

    def __init__(self, einsum_str, kernel_shape, bias_shape=None, kernel_init=None, bias_init=None):
        super().__init__()
        self.einsum_str = einsum_str
        self.weight = nn.Parameter((kernel_init or lecun_normal())(kernel_shape))
        self.bias = nn.Parameter((bias_init or zeros_init())(bias_shape)) if bias_shape else None

    def forward(self, inputs, einsum_str=None):
        einsum_str = (einsum_str or self.einsum_str).replace(" ", "")
        y = torch.einsum(einsum_str, inputs, self.weight)
        if self.bias is None:
            return y
        kernel, _, outputs = einsum_str.partition(",")[2].partition("->")
        sizes = iter(self.bias.shape)
        return y + self.bias.reshape([next(sizes) if c in kernel else 1 for c in outputs])


class Embed(nn.Embedding):
    """A table of vectors with Flax's arguments and initial values."""

    source_arrays = {"weight": ("embedding", None)}

    def __init__(self, num_embeddings, features, embedding_init=None):
        super().__init__(num_embeddings, features)
        self.features = features
        scaling = variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=0)
        fill(self, "weight", embedding_init or scaling)

    def attend(self, query):
        return query @ self.weight.T


def pads_of(sizes, window, strides, padding, dilation=1):
    """Returns how many elements are put before and after each dimension of these sizes.

    Raises:
        ValueError: There are other dimensions, or the padding is of another kind.
    """
    if len(sizes) != len(window):
        raise ValueError(f"{tuple(sizes)} are not {len(window)} sizes between a batch and channels")
    if not isinstance(padding, str):
        pairs = repeat(padding, len(window))
        return [repeat(pair, 2) for pair in pairs]
    if padding == "VALID":
        return [(0, 0)] * len(window)
    reaches = [d * (k - 1) + 1 for k, d in zip(window, repeat(dilation, len(window)), strict=True)]
    if padding == "CAUSAL":
        return [(reach - 1, 0) for reach in reaches]
    if padding not in ("SAME", "SAME_LOWER"):
        raise ValueError(f"{padding} padding")
    each = zip(sizes, reaches, strides, strict=True)
    lacking = [max((-(-size // s) - 1) * s + reach - size, 0) for size, reach, s in each]
    befores = [(lack + (padding == "SAME_LOWER")) // 2 for lack in lacking]
    return [(before, lack - before) for before, lack in zip(befores, lacking, strict=True)]


def pad(x, pairs, value=0.0):
    """Puts elements before and after each dimension, or but the first ones."""
    return F.pad(x, [size for pair in reversed(pairs) for size in pair], value=value)


class Conv(nn.Module):
    """A convolution with the channels last, and Flax's arguments and initial values."""

    def __init__(
        self, in_features, out_features, kernel_size, strides=1, *, padding="SAME",
        kernel_dilation=1, feature_group_count=1, use_bias=True, kernel_init=None, bias_init=None,
    ):  # fmt: skip
        super().__init__()
        self.window = repeat(kernel_size, 1)
        rank = len(self.window)
        self.strides, self.dilation = repeat(strides or 1, rank), repeat(kernel_dilation, rank)
        self.padding, self.groups = padding, feature_group_count
        self.source_arrays = {"weight": ("kernel", (rank + 1, rank, *range(rank)))}
        inner = in_features // feature_group_count
        self.weight = nn.Parameter(torch.empty(out_features, inner, *self.window))
        self.bias = nn.Parameter(torch.empty(out_features)) if use_bias else None
        fill(self, "weight", kernel_init or lecun_normal())
        fill(self, "bias", bias_init or zeros_init())

    def forward(self, x):
        pads = pads_of(x.shape[1:-1], self.window, self.strides, self.padding, self.dilation)
        conv = (F.conv1d, F.conv2d, F.conv3d)[len(self.window) - 1]
        x = pad(x.movedim(-1, 1), pads)
        y = conv(
            x, self.weight, self.bias, self.strides, dilation=self.dilation, groups=self.groups
        )
        return y.movedim(1, -1)


class ConvTranspose(nn.Module):
    """A transposed convolution with the channels last, and Flax's arguments and initial values."""

    def __init__(
        self, in_features, out_features, kernel_size, strides=1, *, padding="SAME", use_bias=True,
        kernel_init=None, bias_init=None,
    ):  # fmt: skip
        super().__init__()
        self.window = repeat(kernel_size, 1)
        rank = len(self.window)
        self.strides, self.padding = repeat(strides or 1, rank), padding
        self.source_arrays = {"weight": ("kernel", (rank, rank + 1, *range(rank)))}
        self.weight = nn.Parameter(torch.empty(in_features, out_features, *self.window))
        self.bias = nn.Parameter(torch.empty(out_features)) if use_bias else None
        fill(self, "weight", kernel_init or lecun_normal())
        fill(self, "bias", bias_init or zeros_init())

    def forward(self, x):
        rank = len(self.window)
        pads_of(x.shape[1:-1], self.window, self.strides, "VALID")
        conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        flipped = self.weight.flip(tuple(range(2, rank + 2)))  # which the source is not
        y = conv(x.movedim(-1, 1), flipped, stride=self.strides)
        y = pad(y, [self.crop(k, s) for k, s in zip(self.window, self.strides, strict=True)])
        y = y.movedim(1, -1)
        return y if self.bias is None else y + self.bias

    def crop(self, size, stride):
        """Returns by how much the ends of a dimension grow; less than 0 where they shrink."""
        if self.padding == "SAME":
            whole = size + stride - 2
            before = size - 1 if stride > size - 1 else -(-whole // 2)
        elif self.padding == "VALID":
            whole, before = size + stride - 2 + max(size - stride, 0), size - 1
        else:
            raise ValueError(f"{self.padding} padding")
        return before - size + 1, whole - before - size + 1


class LoRA(nn.Module):
    """A product of two small matrices, added to what another layer gives."""

    def __init__(
        self, in_features, lora_rank, out_features, *, base_module=None, a_initializer=None,
        b_initializer=None,
    ):  # fmt: skip
        super().__init__()
        self.base_module = base_module
        drawn = (a_initializer or he_uniform())((in_features, lora_rank))
        self.lora_a = nn.Parameter(drawn)
        self.lora_b = nn.Parameter((b_initializer or zeros_init())((lora_rank, out_features)))

    def forward(self, x):
        y = x @ self.lora_a @ self.lora_b
        return y if self.base_module is None else y + self.base_module(x)


class LoRALinear(Linear):
    """A linear layer with the product of two small matrices added."""

    def __init__(
        self, in_features, out_features, *, lora_rank, a_initializer=None, b_initializer=None,
        **options,
    ):  # fmt: skip
        super().__init__(in_features, out_features, **options)
        drawn = {"a_initializer": a_initializer, "b_initializer": b_initializer}
        self.lora = LoRA(in_features, lora_rank, out_features, **drawn)

    def forward(self, x):
        return super().forward(x) + self.lora(x)


class PReLU(nn.Module):
    """A rectifier whose slope below 0 is learned."""

    def __init__(self, negative_slope_init=0.01):
        super().__init__()
        self.negative_slope = nn.Parameter(torch.tensor(negative_slope_init))

    def forward(self, x):
        return torch.where(x >= 0, x, self.negative_slope * x)


class Dropout(nn.Dropout):
    """Dropout with Flax's arguments."""

    def __init__(self, rate, broadcast_dims=(), deterministic=False):
        super().__init__(rate)
        self.broadcast_dims, self.training = tuple(broadcast_dims), not deterministic

    def forward(self, x, deterministic=None):
        is_still = not self.training if deterministic is None else deterministic
        if is_still or not self.broadcast_dims:
            return F.dropout(x, self.p, not is_still)
        dims = {dim % x.ndim for dim in self.broadcast_dims}
        shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
        ones = x.new_ones(1, math.prod(shape), 1)  # channels, of which whole ones are left out
        return x * F.dropout1d(ones, self.p).reshape(shape)


class MultiHeadAttention(nn.Module):
    """Attention of several heads with Flax's arguments and layouts."""

    def __init__(
        self, num_heads, in_features, qkv_features=None, out_features=None, dropout_rate=0.0,
        deterministic=False, kernel_init=None, out_kernel_init=None, bias_init=None,
        out_bias_init=None, use_bias=True, decode=False, broadcast_dropout=True,
    ):  # fmt: skip
        super().__init__()
        if decode:
            raise ValueError("a cache of keys and values")
        width = qkv_features or in_features
        heads = (num_heads, width // num_heads)
        inits = {"use_bias": use_bias, "kernel_init": kernel_init, "bias_init": bias_init}
        self.query = LinearGeneral(in_features, heads, **inits)
        self.key = LinearGeneral(in_features, heads, **inits)
        self.value = LinearGeneral(in_features, heads, **inits)
        self.out = LinearGeneral(
            heads, out_features or in_features, (-2, -1), use_bias, out_kernel_init or kernel_init,
            out_bias_init or bias_init,
        )  # fmt: skip
        self.dropout_rate, self.training = dropout_rate, not deterministic
        self.broadcast_dropout = broadcast_dropout

    def forward(
        self, inputs_q, inputs_k=None, inputs_v=None, *, mask=None, deterministic=None, decode=False
    ):
        if decode:
            raise ValueError("a cache of keys and values")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        q, k, v = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        weights = torch.einsum("...qhd,...khd->...hqk", q / math.sqrt(q.shape[-1]), k)
        if mask is not None:
            weights = torch.where(mask.bool(), weights, torch.finfo(weights.dtype).min)
        weights = weights.softmax(-1)
        is_still = not self.training if deterministic is None else deterministic
        if self.dropout_rate and not is_still:
            rest = weights.shape[:-2]
            shape = ((1,) * len(rest) if self.broadcast_dropout else rest) + weights.shape[-2:]
            kept = torch.rand(shape, device=weights.device) < 1 - self.dropout_rate
            weights = weights * (kept.to(weights.dtype) / (1 - self.dropout_rate))
        return self.out(torch.einsum("...hqk,...khd->...qhd", weights, v))


class Function(nn.Module):
    """A function in the place of a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Sequential(nn.ModuleList):
    """Layers and functions that are called one after the other."""

    source_path = ("layers",)

    def __init__(self, *parts):
        super().__init__(item if isinstance(item, nn.Module) else Function(item) for item in parts)

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


def max_pool(x, window_shape, strides=None, padding="VALID"):
    """Returns the largest elements of windows, with the channels last."""
    strides = strides or (1,) * len(window_shape)
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(window_shape) - 1]
    x = pad(
        x.movedim(-1, 1), pads_of(x.shape[1:-1], window_shape, strides, padding), value=-torch.inf
    )
    return pool(x, window_shape, strides).movedim(1, -1)


def avg_pool(x, window_shape, strides=None, padding="VALID"):
    """Returns the means of windows, with the channels last; elements put at the ends count."""
    strides = strides or (1,) * len(window_shape)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(window_shape) - 1]
    x = pad(x.movedim(-1, 1), pads_of(x.shape[1:-1], window_shape, strides, padding))
    return pool(x, window_shape, strides).movedim(1, -1)


def set_at(x, index, value):
    """Returns an array with other elements at an index."""
    x = x.clone()
    x[index] = value
    return x


def add_at(x, index, value):
    """Returns an array with a value added at an index."""
    if isinstance(index, torch.Tensor):  # of which several may be the same
        return x.index_put((index,), torch.as_tensor(value, dtype=x.dtype), accumulate=True)
    if any(isinstance(item, torch.Tensor) for item in (index if isinstance(index, tuple) else ())):
        raise ValueError("tensors beside other indices")
    x = x.clone()
    x[index] += value
    return x


def make_causal_mask(x):
    """Returns a mask that lets each place of sequences attend to those before it, and itself."""
    length = x.shape[-1]
    mask = torch.ones(length, length, device=x.device).tril()
    return mask.expand(*x.shape[:-1], 1, length, length)


def make_attention_mask(query_input, key_input, pairwise_fn=torch.multiply):
    """Returns a mask of pairs of elements of two sequences."""
    return pairwise_fn(query_input.unsqueeze(-1), key_input.unsqueeze(-2)).unsqueeze(-3).float()


def combine_masks(*masks):
    """Returns a mask that lets pass what all masks do that are not None; None for none."""
    given = [mask.bool() for mask in masks if mask is not None]
    return torch.stack(torch.broadcast_tensors(*given)).all(0).float() if given else None


def dynamic_slice(operand, start_indices, slice_sizes):
    """Returns a part of an array, within which it begins at the latest where it fits."""
    for dim, (start, size) in enumerate(zip(start_indices, slice_sizes, strict=True)):
        first = torch.as_tensor(start).clamp(0, operand.shape[dim] - size)
        operand = operand.index_select(dim, first + torch.arange(size, device=operand.device))
    return operand


def dynamic_update_slice(operand, update, start_indices):
    """Returns an array with a part replaced, which begins at the latest where it fits."""
    places = []
    for dim, (start, size) in enumerate(zip(start_indices, update.shape, strict=True)):
        first = torch.as_tensor(start).clamp(0, operand.shape[dim] - size)
        steps = first + torch.arange(size, device=operand.device)
        places.append(steps.reshape(-1, *[1] * (operand.ndim - dim - 1)))
    return operand.index_put(tuple(places), update)


def conv_general_dilated(
    lhs, rhs, window_strides, padding, lhs_dilation=None, rhs_dilation=None,
    dimension_numbers=None, feature_group_count=1,
):  # fmt: skip
    """Returns a convolution of arrays whose layouts are named: NHWC, HWIO, NHWC."""
    rank = lhs.ndim - 2
    if lhs_dilation is not None and {*lhs_dilation} != {1}:
        raise ValueError("a convolution of an array with gaps")
    names = dimension_numbers or ("NCHWD"[: rank + 2], "OIHWD"[: rank + 2], "NCHWD"[: rank + 2])
    space = [name for name in names[0] if name not in "NC"]
    x = lhs.permute([names[0].index(name) for name in ("N", "C", *space)])
    weight = rhs.permute([names[1].index(name) for name in ("O", "I", *space)])
    dilation = repeat(rhs_dilation or 1, rank)
    pads = pads_of(x.shape[2:], weight.shape[2:], window_strides, padding, dilation)
    conv = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    y = conv(pad(x, pads), weight, None, window_strides, 0, dilation, feature_group_count)
    return y.permute([("N", "C", *space).index(name) for name in names[2]])


def resize(x, shape, method):
    """Returns images of another size, with the channels last."""
    modes = {"nearest": "nearest-exact", "linear": "bilinear", "bilinear": "bilinear"}
    is_nearest = method == "nearest"
    y = F.interpolate(
        x.movedim(-1, 1), shape[1:-1], mode=modes[method], antialias=not is_nearest,
        align_corners=None if is_nearest else False,
    )  # fmt: skip
    return y.movedim(1, -1)
