"""Layers that files for Equinox have beside the model's classes, with PyTorch's arguments.

They take batches, as PyTorch's do. A file takes the source of those that it names.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from fmapper_translate.equinox.weights import Keys, buffer, iter_modules
from fmapper_translate.targets.functions import batch_norm, flatten, ntuple, uniform_init

if TYPE_CHECKING:
    import einops  # which the files that name it have


class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __init__(self, in_features, out_features, bias=True, *, key):
        super().__init__(in_features, out_features, use_bias=bias, key=key)

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


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


class LayerNorm(eqx.nn.LayerNorm):
    """Normalisation of the last dimensions."""

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True):
        shape = ntuple(normalized_shape, 1)
        super().__init__(shape, eps, elementwise_affine, elementwise_affine and bias)

    def __call__(self, x):
        axes = tuple(range(-len(self.shape), 0))
        mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(var + self.eps)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias


class GroupNorm(eqx.Module):
    """Normalisation of groups of channels, which come second."""

    weight: jax.Array | None
    bias: jax.Array | None
    num_groups: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, num_groups, num_channels, eps=1e-5, affine=True):
        self.weight = jnp.ones(num_channels) if affine else None
        self.bias = jnp.zeros(num_channels) if affine else None
        self.num_groups, self.eps = num_groups, eps

    def __call__(self, x):
        groups = x.reshape(x.shape[0], self.num_groups, -1)
        mean, var = groups.mean(-1, keepdims=True), groups.var(-1, keepdims=True)
        y = ((groups - mean) * jax.lax.rsqrt(var + self.eps)).reshape(x.shape)
        if self.weight is None:
            return y
        shape = (-1, *(1,) * (x.ndim - 2))
        return y * self.weight.reshape(shape) + self.bias.reshape(shape)


class BatchNorm2d(eqx.Module):
    """Normalisation of channels, which come second, in training by those of the batch."""

    weight: jax.Array | None
    bias: jax.Array | None
    eps: float = eqx.field(static=True)
    momentum: float | None = eqx.field(static=True)
    inference: bool
    running_mean: jax.Array = buffer()
    running_var: jax.Array = buffer()
    num_batches_tracked: jax.Array | None = buffer()

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True):
        self.weight = jnp.ones(num_features) if affine else None
        self.bias = jnp.zeros(num_features) if affine else None
        self.running_mean, self.running_var = jnp.zeros(num_features), jnp.ones(num_features)
        self.num_batches_tracked = jnp.zeros((), int) if momentum is None else None
        self.eps, self.momentum, self.inference = eps, momentum, False

    def __call__(self, x, *, statistics=None):
        if self.inference:
            mean, var = jax.lax.stop_gradient((self.running_mean, self.running_var))
            return batch_norm(x, self.eps, self.weight, self.bias, mean=mean, var=var)
        if statistics is None:
            raise ValueError("in training, pass statistics=Statistics(model) to the call")
        axes = (0, *range(2, x.ndim))
        mean, var, count = x.mean(axes), x.var(axes), x.size // x.shape[1]
        statistics[self] = statistics[self].add_batch(mean, var * count / (count - 1))
        return batch_norm(x, self.eps, self.weight, self.bias, mean=mean, var=var)

    def add_batch(self, mean, var):
        """Returns the layer with the statistics of one more batch."""
        names, rate, new = ["running_mean", "running_var"], self.momentum, []
        if rate is None:
            new, rate = [self.num_batches_tracked + 1], 1 / (self.num_batches_tracked + 1)
            names.insert(0, "num_batches_tracked")
        new += [(1 - rate) * self.running_mean + rate * mean]
        new += [(1 - rate) * self.running_var + rate * var]
        return eqx.tree_at(lambda layer: [getattr(layer, name) for name in names], self, new)


class BatchNorm1d(BatchNorm2d):
    """Normalisation of features, or of sequences with the channels second."""


class BatchNorm3d(BatchNorm2d):
    """Normalisation of volumes with the channels second."""


class Conv1d(eqx.Module):
    """A convolution of sequences with the channels first."""

    rank: ClassVar[int] = 1
    weight: jax.Array
    bias: jax.Array | None
    in_channels: int = eqx.field(static=True)
    out_channels: int = eqx.field(static=True)
    kernel_size: tuple[int, ...] = eqx.field(static=True)
    stride: tuple[int, ...] = eqx.field(static=True)
    padding: Any = eqx.field(static=True)
    dilation: tuple[int, ...] = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    padding_mode: str = eqx.field(static=True)

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1,
        bias=True, padding_mode="zeros", *, key,
    ):  # fmt: skip
        if padding_mode != "zeros" and isinstance(padding, str):
            raise ValueError(f"{padding_mode} padding of a size that is called {padding!r}")
        self.padding_mode = padding_mode
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = ntuple(kernel_size, self.rank), ntuple(stride, self.rank)
        self.dilation = ntuple(dilation, self.rank)
        self.padding = padding if isinstance(padding, str) else ntuple(padding, self.rank)
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        bound, (first, second) = math.prod(shape[1:]) ** -0.5, jax.random.split(key)
        self.weight = uniform_init(-bound, bound)(first, shape)
        self.bias = uniform_init(-bound, bound)(second, (out_channels,)) if bias else None

    def __call__(self, x):
        is_named = isinstance(self.padding, str)
        pads = self.padding.upper() if is_named else [(size, size) for size in self.padding]
        if self.padding_mode != "zeros":
            modes = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
            x, pads = jnp.pad(x, [(0, 0), (0, 0), *pads], modes[self.padding_mode]), "VALID"
        y = jax.lax.conv_general_dilated(
            x, self.weight, self.stride, pads, rhs_dilation=self.dilation,
            feature_group_count=self.groups,
        )  # fmt: skip
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * self.rank)


class Conv2d(Conv1d):
    """A convolution of images with the channels first."""

    rank: ClassVar[int] = 2


class Conv3d(Conv1d):
    """A convolution of volumes with the channels first."""

    rank: ClassVar[int] = 3


class ConvTranspose1d(Conv1d):
    """A transposed convolution of sequences with the channels first."""

    output_padding: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, output_padding=0,
        groups=1, bias=True, dilation=1, *, key,
    ):  # fmt: skip
        super().__init__(
            out_channels, in_channels, kernel_size, stride, padding, dilation, groups, bias, key=key
        )
        self.in_channels, self.out_channels = in_channels, out_channels
        bound = math.prod(self.weight.shape[1:]) ** -0.5
        self.bias = uniform_init(-bound, bound)(key, (out_channels,)) if bias else None
        self.output_padding = ntuple(output_padding, self.rank)

    def __call__(self, x):
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        sizes = zip(reach, self.padding, self.output_padding, strict=True)
        kernel = jnp.flip(self.weight, range(2, self.weight.ndim))
        kernel = kernel.reshape(self.groups, -1, *kernel.shape[1:]).swapaxes(1, 2)
        y = jax.lax.conv_general_dilated(
            x, kernel.reshape(-1, *kernel.shape[2:]), (1,) * self.rank,
            [(r - p, r - p + more) for r, p, more in sizes], lhs_dilation=self.stride,
            rhs_dilation=self.dilation, feature_group_count=self.groups,
        )  # fmt: skip
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * self.rank)


class ConvTranspose2d(ConvTranspose1d):
    """A transposed convolution of images with the channels first."""

    rank: ClassVar[int] = 2


class ConvTranspose3d(ConvTranspose1d):
    """A transposed convolution of volumes with the channels first."""

    rank: ClassVar[int] = 3


class MultiheadAttention(eqx.Module):
    """Attention of several heads."""

    in_proj_weight: jax.Array
    in_proj_bias: jax.Array | None
    out_proj: Linear
    dropout: eqx.nn.Dropout
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    batch_first: bool = eqx.field(static=True)

    def __init__(self, embed_dim, num_heads, dropout=0.0, bias=True, *, batch_first=False, key):
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        first, second = jax.random.split(key)
        bound = (1.5 / embed_dim) ** 0.5
        self.in_proj_weight = uniform_init(-bound, bound)(first, (3 * embed_dim, embed_dim))
        self.in_proj_bias = jnp.zeros(3 * embed_dim) if bias else None
        out_proj = Linear(embed_dim, embed_dim, bias, key=second)
        if bias:
            out_proj = eqx.tree_at(lambda layer: layer.bias, out_proj, jnp.zeros(embed_dim))
        self.out_proj = out_proj
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(
        self, query, key_, value, key_padding_mask=None, need_weights=True, attn_mask=None,
        average_attn_weights=True, is_causal=False, *, key=None,
    ):  # fmt: skip
        given = (query, key_, value)
        if not self.batch_first:
            given = [x.swapaxes(0, 1) for x in given]
        matrices = jnp.split(self.in_proj_weight, 3)
        projected = [x @ matrix.T for x, matrix in zip(given, matrices, strict=True)]
        if self.in_proj_bias is not None:
            biases = jnp.split(self.in_proj_bias, 3)
            projected = [x + bias for x, bias in zip(projected, biases, strict=True)]
        shape = (self.num_heads, self.embed_dim // self.num_heads)
        q, k, v = (x.reshape(*x.shape[:-1], *shape).swapaxes(-2, -3) for x in projected)
        scores = q * shape[1] ** -0.5 @ k.swapaxes(-1, -2)
        masks = [] if attn_mask is None else [attn_mask.reshape(-1, *scores.shape[1:])
                 if attn_mask.ndim == 3 else attn_mask]  # fmt: skip
        if key_padding_mask is not None:
            masks.append(key_padding_mask[:, None, None, :])
        for mask in masks:
            scores = jnp.where(mask, -jnp.inf, scores) if mask.dtype == bool else scores + mask
        weights = self.dropout(jax.nn.softmax(scores), key=key)
        y = (weights @ v).swapaxes(-2, -3)
        y = self.out_proj(y.reshape(*y.shape[:-2], self.embed_dim))
        y = y if self.batch_first else y.swapaxes(0, 1)
        if not need_weights:
            return y, None
        return y, weights.mean(-3) if average_attn_weights else weights


class Sequential(eqx.Module):
    """Parts that are called one after the other, by number or by name."""

    inside: ClassVar[str] = "layers"
    layers: OrderedDict[str, Any]

    def __init__(self, *parts):
        by_name = parts[0] if parts and isinstance(parts[0], dict) else dict(enumerate(parts))
        self.layers = OrderedDict((str(name), part) for name, part in by_name.items())

    def add_module(self, name, part):
        self.layers[name] = part

    def append(self, part):
        self.layers[str(len(self.layers))] = part

    def __len__(self):
        return len(self.layers)

    def __iter__(self):
        return iter(self.layers.values())

    def __getitem__(self, at):
        parts = [*self][at]
        return Sequential(*parts) if isinstance(at, slice) else parts

    def __call__(self, x, *, key=None, statistics=None):
        keys = Keys(key)
        for part in self:
            x = call_part(part, x, key=keys(), statistics=statistics)
        return x


class ModuleDict(eqx.Module):
    """Modules by name, which are attributes, too."""

    inside: ClassVar[str] = "parts"
    parts: OrderedDict[str, Any]

    def __init__(self, parts=()):
        self.parts = OrderedDict(parts)

    def __getattr__(self, name):
        parts = vars(self).get("parts", {})
        if name not in parts:
            raise AttributeError(name)
        return parts[name]

    def __getitem__(self, name):
        return self.parts[name]

    def __setitem__(self, name, part):
        self.parts[name] = part

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)

    def keys(self):
        return self.parts.keys()

    def values(self):
        return self.parts.values()

    def items(self):
        return self.parts.items()


def call_part(part, *args, key=None, statistics=None, **options):
    """Calls a part of a model with a random key and statistics, if it takes them."""
    names = inspect.signature(type(part).__call__).parameters
    if "key" in names or isinstance(part, eqx.nn.Dropout):
        options["key"] = key
    if "statistics" in names:
        options["statistics"] = statistics
    return part(*args, **options)


class Slot:
    """The place of a value that methods of a module share within a call of the model."""

    value = None

    def __eq__(self, other):
        return isinstance(other, Slot)  # or two models would be trees of two structures

    def __hash__(self):
        return hash(Slot)


def forget(module):
    """Has the slots in a module hold nothing, as a call finds them."""
    for _, part in iter_modules(module):
        for slot in vars(part).values():
            if isinstance(slot, Slot):
                slot.value = None


class Rearrange(eqx.Module):
    """An array in another order, by a pattern of einops."""

    pattern: str = eqx.field(static=True)
    sizes: tuple[tuple[str, int], ...] = eqx.field(static=True)

    def __init__(self, pattern, **sizes):
        self.pattern, self.sizes = pattern, tuple(sizes.items())

    def __call__(self, x):
        return einops.rearrange(x, self.pattern, **dict(self.sizes))


class Reduce(eqx.Module):
    """An array with fewer dimensions, by a pattern of einops."""

    pattern: str = eqx.field(static=True)
    reduction: str = eqx.field(static=True)
    sizes: tuple[tuple[str, int], ...] = eqx.field(static=True)

    def __init__(self, pattern, reduction, **sizes):
        self.pattern, self.reduction, self.sizes = pattern, reduction, tuple(sizes.items())

    def __call__(self, x):
        return einops.reduce(x, self.pattern, self.reduction, **dict(self.sizes))


class Flatten(eqx.Module):
    """An array some of whose dimensions are one."""

    start: int = eqx.field(static=True)
    end: int = eqx.field(static=True)

    def __init__(self, start_dim=1, end_dim=-1):
        self.start, self.end = start_dim, end_dim

    def __call__(self, x):
        return flatten(x, self.start, self.end)
