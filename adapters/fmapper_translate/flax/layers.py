"""Layers that files for Flax NNX have beside the model's classes, with PyTorch's arguments.

A file takes the source of those that it names.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from fmapper_translate.flax.weights import freeze
from fmapper_translate.targets.functions import batch_norm, flatten, ntuple, uniform_init

if TYPE_CHECKING:
    import einops  # which the files that name it have


class Linear(nnx.Linear):
    """A linear layer with PyTorch's arguments and initial values."""

    source_arrays = {"kernel": ("weight", (1, 0))}

    def __init__(self, in_features, out_features, bias=True, *, rngs):
        bound = in_features**-0.5
        init = uniform_init(-bound, bound)
        super().__init__(
            in_features, out_features, use_bias=bias, kernel_init=init, bias_init=init, rngs=rngs
        )


class TiedLinear(Linear):
    """A linear layer with the matrix of an embedding."""

    source_arrays = {"embedding": ("weight", None)}  # type: ignore[dict-item]

    def __call__(self, x):
        y = x @ self.embedding[...].T
        return y if self.bias is None else y + self.bias[...]


def tie(target, source):
    """Gives a linear layer and an embedding one matrix, that of the source."""
    linear, table = (target, source) if isinstance(target, nnx.Linear) else (source, target)
    if linear is source:
        table.embedding[...] = linear.kernel[...].T
    del linear.kernel
    linear.embedding = table.embedding
    object.__setattr__(linear, "__class__", TiedLinear)


class Embedding(nnx.Embed):
    """A table of vectors with PyTorch's arguments and initial values."""

    source_arrays = {"embedding": ("weight", None)}

    def __init__(
        self, num_embeddings, embedding_dim, padding_idx=None, *, _freeze=False, rngs
    ):  # fmt: skip
        init = nnx.initializers.normal(1.0)
        super().__init__(num_embeddings, embedding_dim, embedding_init=init, rngs=rngs)
        self.embedding_dim, self.padding_idx = embedding_dim, padding_idx
        if padding_idx is not None:
            self.embedding[...] = self.embedding[...].at[padding_idx].set(0.0)
        if _freeze:
            freeze(self)

    def __call__(self, ids):
        x = super().__call__(ids)
        if self.padding_idx is None:
            return x
        is_padding = (ids == self.padding_idx % self.num_embeddings)[..., None]
        return jnp.where(is_padding, jax.lax.stop_gradient(x), x)  # its vector is not trained


class EmbeddingBag(nnx.Embed):
    """Sums, means or maxima of the vectors of bags, which are rows or begin at offsets."""

    source_arrays = {"embedding": ("weight", None)}

    def __init__(self, num_embeddings, embedding_dim, *, mode="mean", rngs):
        init = nnx.initializers.normal(1.0)
        super().__init__(num_embeddings, embedding_dim, embedding_init=init, rngs=rngs)
        self.embedding_dim, self.mode = embedding_dim, mode

    def __call__(self, ids, offsets=None, per_sample_weights=None):
        count = len(ids) if offsets is None else len(offsets)
        bags = jnp.arange(count).repeat(ids.size // count)
        if offsets is not None:
            bags = jnp.searchsorted(offsets, jnp.arange(ids.size), side="right") - 1
        x, sizes = super().__call__(ids.reshape(-1)), jnp.bincount(bags, length=count)[:, None]
        if per_sample_weights is not None:
            x = x * per_sample_weights.reshape(-1, 1)
        if self.mode == "max":
            return jnp.where(sizes, jax.ops.segment_max(x, bags, count), 0)
        total = jax.ops.segment_sum(x, bags, count)
        return total / jnp.maximum(sizes, 1) if self.mode == "mean" else total


class LayerNorm(nnx.LayerNorm):
    """Normalisation of the last dimensions with PyTorch's arguments."""

    source_arrays = {"scale": ("weight", None)}

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, *, rngs):
        self.normalized_shape = ntuple(normalized_shape, 1)
        has_bias = elementwise_affine and bias
        super().__init__(
            math.prod(self.normalized_shape), epsilon=eps, use_scale=elementwise_affine,
            use_bias=has_bias, use_fast_variance=False, rngs=rngs,
        )  # fmt: skip
        if elementwise_affine:
            self.scale = nnx.Param(jnp.ones(self.normalized_shape))
        if has_bias:
            self.bias = nnx.Param(jnp.zeros(self.normalized_shape))

    def __call__(self, x):
        count = len(self.normalized_shape)
        if count == 1:
            return super().__call__(x)
        axes = tuple(range(-count, 0))
        y = (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(
            x.var(axes, keepdims=True) + self.epsilon
        )
        y = y if self.scale is None else y * self.scale
        return y if self.bias is None else y + self.bias


class Dropout2d(nnx.Dropout):
    """Dropout of channels, which come second, of images and of sequences."""

    def __init__(self, rate=0.5, *, rngs):
        super().__init__(rate, broadcast_dims=(-2, -1), rngs=rngs)

    def __call__(self, x, **options):
        if x.ndim == 3:  # a batch of sequences, as in PyTorch
            return super().__call__(x[..., None], **options)[..., 0]
        return super().__call__(x, **options)


class Conv1d(nnx.Conv):
    """A convolution with the channels first, and PyTorch's initial values."""

    rank = 1
    source_arrays = {"kernel": ("weight", (2, 1, 0))}

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1,
        bias=True, padding_mode="zeros", *, rngs,
    ):  # fmt: skip
        self.pads = padding if isinstance(padding, str) else ntuple(padding, self.rank)
        window = ntuple(kernel_size, self.rank)
        reach = [d * (k - 1) for d, k in zip(ntuple(dilation, self.rank), window, strict=True)]
        if isinstance(padding, str):
            reach = reach if padding == "same" else [0] * self.rank
            pads = tuple((r // 2, r - r // 2) for r in reach)
        else:
            pads = tuple((size, size) for size in ntuple(padding, self.rank))
        self.padding_mode, self.around = padding_mode, pads
        bound = (in_channels // groups * math.prod(window)) ** -0.5
        init = uniform_init(-bound, bound)
        super().__init__(
            in_channels, out_channels, window, ntuple(stride, self.rank),
            padding=pads if padding_mode == "zeros" else "VALID",
            kernel_dilation=ntuple(dilation, self.rank), feature_group_count=groups, use_bias=bias,
            kernel_init=init, bias_init=init, rngs=rngs,
        )  # fmt: skip
        self.in_channels, self.out_channels = in_channels, out_channels
        self.stride = ntuple(stride, self.rank)

    def __call__(self, x):
        if self.padding_mode != "zeros":
            mode = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
            x = jnp.pad(x, ((0, 0), (0, 0), *self.around), mode=mode[self.padding_mode])
        return jnp.moveaxis(super().__call__(jnp.moveaxis(x, 1, -1)), -1, 1)


class Conv2d(Conv1d):
    """A convolution of images with the channels first."""

    rank = 2
    source_arrays = {"kernel": ("weight", (2, 3, 1, 0))}  # type: ignore[dict-item]


class Conv3d(Conv1d):
    """A convolution of volumes with the channels first."""

    rank = 3
    source_arrays = {"kernel": ("weight", (2, 3, 4, 1, 0))}  # type: ignore[dict-item]


class ConvTranspose1d(nnx.ConvTranspose):
    """A transposed convolution with the channels first."""

    rank = 1
    source_arrays = {"kernel": ("weight", (2, 1, 0))}

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, output_padding=0,
        groups=1, bias=True, dilation=1, *, rngs,
    ):  # fmt: skip
        window, dilation = ntuple(kernel_size, self.rank), ntuple(dilation, self.rank)
        reach = [d * (k - 1) for d, k in zip(dilation, window, strict=True)]
        more = ntuple(output_padding, self.rank)
        sizes = zip(reach, ntuple(padding, self.rank), more, strict=True)
        bound = (out_channels * math.prod(window)) ** -0.5
        init = uniform_init(-bound, bound)
        super().__init__(
            in_channels, out_channels // groups, window, ntuple(stride, self.rank),
            padding=[(r - p, r - p + more) for r, p, more in sizes],
            kernel_dilation=dilation, use_bias=bias, transpose_kernel=True,
            kernel_init=init, bias_init=init, rngs=rngs,
        )  # fmt: skip
        self.groups, self.pads = groups, ntuple(padding, self.rank)
        self.in_channels, self.out_channels = in_channels, out_channels
        if bias and groups > 1:
            self.bias = nnx.Param(init(rngs.params(), (out_channels,)))

    def __call__(self, x):
        x = jnp.moveaxis(x, 1, -1)
        if self.groups == 1:
            return jnp.moveaxis(super().__call__(x), -1, 1)
        parts = zip(*(jnp.split(y, self.groups, -1) for y in (x, self.kernel[...])), strict=True)
        made = [
            jax.lax.conv_transpose(part, kernel, self.strides, self.padding,
                                   rhs_dilation=self.kernel_dilation, transpose_kernel=True)
            for part, kernel in parts
        ]  # fmt: skip
        y = jnp.concatenate(made, axis=-1)
        return jnp.moveaxis(y if self.bias is None else y + self.bias[...], -1, 1)


class ConvTranspose2d(ConvTranspose1d):
    """A transposed convolution of images with the channels first."""

    rank = 2
    source_arrays = {"kernel": ("weight", (2, 3, 1, 0))}  # type: ignore[dict-item]


class ConvTranspose3d(ConvTranspose1d):
    """A transposed convolution of volumes with the channels first."""

    rank = 3
    source_arrays = {"kernel": ("weight", (2, 3, 4, 1, 0))}  # type: ignore[dict-item]


class BatchNorm2d(nnx.Module):
    """Normalisation of batches, with the channels first."""

    source_arrays = {
        "scale": ("weight", None), "mean": ("running_mean", None), "var": ("running_var", None),
    }  # fmt: skip

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True, *, rngs=None):
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.scale = nnx.Param(jnp.ones(num_features)) if affine else None
        self.bias = nnx.Param(jnp.zeros(num_features)) if affine else None
        self.mean = nnx.BatchStat(jnp.zeros(num_features))
        self.var = nnx.BatchStat(jnp.ones(num_features))
        self.use_running_average = False

    def __call__(self, x):
        mean, var = self.mean[...], self.var[...]
        if not self.use_running_average:
            axes = (0, *range(2, x.ndim))
            mean, var = x.mean(axes), x.var(axes)
            count = x.size // x.shape[1]
            unbiased = var * count / (count - 1)
            self.mean[...] = (1 - self.momentum) * self.mean[...] + self.momentum * mean
            self.var[...] = (1 - self.momentum) * self.var[...] + self.momentum * unbiased
        affine = () if self.scale is None else (self.scale[...], self.bias[...])
        return batch_norm(x, self.eps, *affine, mean=mean, var=var)


class BatchNorm1d(BatchNorm2d):
    """Normalisation of batches of features, or of sequences with the channels first."""


class BatchNorm3d(BatchNorm2d):
    """Normalisation of batches of volumes, with the channels first."""


class GroupNorm(nnx.Module):
    """Normalisation of groups of channels, which come first."""

    source_arrays = {"scale": ("weight", None)}

    def __init__(self, num_groups, num_channels, eps=1e-5, affine=True, *, rngs=None):
        self.num_groups, self.eps = num_groups, eps
        self.scale = nnx.Param(jnp.ones(num_channels)) if affine else None
        self.bias = nnx.Param(jnp.zeros(num_channels)) if affine else None

    def groups_of(self, x):
        return self.num_groups

    def __call__(self, x):
        groups = x.reshape(x.shape[0], self.groups_of(x), -1)
        mean, var = groups.mean(-1, keepdims=True), groups.var(-1, keepdims=True)
        y = ((groups - mean) * jax.lax.rsqrt(var + self.eps)).reshape(x.shape)
        if self.scale is None:
            return y
        shape = (-1, *(1,) * (x.ndim - 2))
        return y * self.scale[...].reshape(shape) + self.bias[...].reshape(shape)


class InstanceNorm2d(GroupNorm):
    """Normalisation of each channel, which come second, of each example."""

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=False, *, rngs=None):
        super().__init__(num_features, num_features, eps, affine)

    def groups_of(self, x):
        return x.shape[1]


class MultiheadAttention(nnx.Module):
    """Attention of several heads with PyTorch's arguments."""

    def __init__(self, embed_dim, num_heads, dropout=0.0, bias=True, *, batch_first=False, rngs):
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        bound = (1.5 / embed_dim) ** 0.5
        draw = uniform_init(-bound, bound)
        self.in_proj_weight = nnx.Param(draw(rngs.params(), (3 * embed_dim, embed_dim)))
        self.in_proj_bias = nnx.Param(jnp.zeros(3 * embed_dim)) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias, rngs=rngs)
        if bias:
            self.out_proj.bias[...] = jnp.zeros(embed_dim)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(
        self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
        average_attn_weights=True, is_causal=False,
    ):  # fmt: skip
        if is_causal and attn_mask is None:
            raise ValueError("is_causal says what attn_mask is: it needs attn_mask")
        given = (query, key, value)
        if not self.batch_first:
            given = [x.swapaxes(0, 1) for x in given]
        matrices = jnp.split(self.in_proj_weight[...], 3)
        projected = [x @ matrix.T for x, matrix in zip(given, matrices, strict=True)]
        if self.in_proj_bias is not None:
            biases = jnp.split(self.in_proj_bias[...], 3)
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
        weights = self.dropout(jax.nn.softmax(scores))
        y = (weights @ v).swapaxes(-2, -3)
        y = self.out_proj(y.reshape(*y.shape[:-2], self.embed_dim))
        y = y if self.batch_first else y.swapaxes(0, 1)
        if not need_weights:
            return y, None
        return y, weights.mean(-3) if average_attn_weights else weights


class Sequential(nnx.Module):
    """Parts that are called one after the other, by number or by name."""

    names: tuple[str, ...] = ()

    def __init__(self, *parts):
        by_name = parts[0] if parts and isinstance(parts[0], dict) else dict(enumerate(parts))
        for name, part in by_name.items():
            self.add_module(str(name), part)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if callable(value) and name not in self.names:
            self.names += (name,)

    def add_module(self, name, part):
        setattr(self, name, part)

    def append(self, part):
        self.add_module(str(len(self.names)), part)

    def __len__(self):
        return len(self.names)

    def __iter__(self):
        return (getattr(self, name) for name in self.names)

    def __getitem__(self, at):
        parts = [*self][at]
        return Sequential(*parts) if isinstance(at, slice) else parts

    def __call__(self, x):
        for part in self:
            x = part(x)
        return x


class ModuleDict(nnx.Dict):  # type: ignore[type-arg]
    """Modules by name, in the order in which they were added."""

    names: tuple[str, ...] = ()

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name not in ("names", *self.names):
            self.names += (name,)

    def __iter__(self):
        return iter(self.names)


class Slot:
    """The place of a value that methods of a module share within a call of the model."""

    value = None


def forget(module):
    """Has the slots in a module hold nothing, as a call finds them."""
    for _, part in nnx.iter_modules(module):
        for slot in vars(part).values():
            if isinstance(slot, Slot):
                slot.value = None


def clone(module, *, rngs):
    """Copies a module, with random numbers of its own."""
    twin = nnx.clone(module)
    for _, node in nnx.iter_graph(twin):
        if isinstance(node, nnx.RngStream):
            node.key[...], node.count[...] = rngs[node.tag](), 0
    return twin


class PlainList(nnx.List):  # type: ignore[type-arg]
    """A list of modules that the source has under other names."""

    is_plain = True


class Rearrange(nnx.Module):
    """An array in another order, by a pattern of einops."""

    def __init__(self, pattern, **sizes):
        self.pattern, self.sizes = pattern, tuple(sizes.items())

    def __call__(self, x):
        return einops.rearrange(x, self.pattern, **dict(self.sizes))


class Reduce(nnx.Module):
    """An array with fewer dimensions, by a pattern of einops."""

    def __init__(self, pattern, reduction, **sizes):
        self.pattern, self.reduction, self.sizes = pattern, reduction, tuple(sizes.items())

    def __call__(self, x):
        return einops.reduce(x, self.pattern, self.reduction, **dict(self.sizes))


class Flatten(nnx.Module):
    """An array some of whose dimensions are one."""

    def __init__(self, start_dim=1, end_dim=-1):
        self.start, self.end = start_dim, end_dim

    def __call__(self, x):
        return flatten(x, self.start, self.end)
