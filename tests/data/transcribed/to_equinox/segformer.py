"""SegFormer for Equinox, transcribed from models.repositories.segformer.

Parameters begin with the values of layers, not with those of the source in Mlp.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from collections.abc import Callable


def ntuple(size: Any, count: int) -> tuple[Any, ...]:
    """Returns a size for each dimension, where one may stand for all."""
    return (size,) * count if isinstance(size, int | float) else tuple(size)


def uniform_init(low, high):
    """Returns an initializer that draws uniformly from an interval."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, low, high)

    return init


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
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        padding_mode="zeros",
        *,
        key,
    ):
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
            x,
            self.weight,
            self.stride,
            pads,
            rhs_dilation=self.dilation,
            feature_group_count=self.groups,
        )
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * self.rank)


class Conv2d(Conv1d):
    """A convolution of images with the channels first."""

    rank: ClassVar[int] = 2


def GELU():
    return partial(jax.nn.gelu, approximate=False)


class Keys:
    """Gives a new random key at each call; None where it was made with None."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        if self.key is None:
            return None
        self.key, new = jax.random.split(self.key)
        return new


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


class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __init__(self, in_features, out_features, bias=True, *, key):
        super().__init__(in_features, out_features, use_bias=bias, key=key)

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Place:
    """An array in a part of a model that is still being made."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __iter__(self):
        return iter((self.owner, self.name))

    def __jax_array__(self):
        return self.array

    @property
    def array(self):
        is_module = isinstance(self.owner, eqx.Module)
        return getattr(self.owner, self.name) if is_module else self.owner[self.name]

    def __getattr__(self, name):
        return getattr(self.array, name)


def initialize(owner, name, init, key):
    """Gives an array of a model that is still being made the values of an initializer."""
    array = Place(owner, name)
    set_part(owner, name, init(key, array.shape, array.dtype))


def interpolate(x, size=None, scale_factor=None, mode="nearest", align_corners=None):
    """Resizes the dimensions behind the channels, as PyTorch does."""
    if mode not in ("nearest", "linear", "bilinear", "trilinear"):
        raise ValueError(f"interpolation of the mode {mode}")
    rank = x.ndim - 2
    factors = ntuple(scale_factor, rank) if size is None else (None,) * rank
    sizes = ntuple(size, rank) if size is not None else x.shape[2:]
    for axis, (new, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        old, count = x.shape[axis], new if factor is None else int(new * factor)
        step = old / count if factor is None else 1 / factor
        at = jnp.arange(count)
        if mode == "nearest":
            x = jnp.take(x, jnp.minimum((at * step).astype(int), old - 1), axis=axis)
            continue
        if align_corners:
            place = at * ((old - 1) / max(count - 1, 1))
        else:
            place = jnp.maximum((at + 0.5) * step - 0.5, 0)
        low = jnp.minimum(place.astype(int), old - 1)
        weight = (place - low).reshape(-1, *(1,) * (x.ndim - axis - 1))
        below, above = (jnp.take(x, i, axis=axis) for i in (low, jnp.minimum(low + 1, old - 1)))
        x = below * (1 - weight) + above * weight
    return x


def iter_modules(module):
    """Yields the modules in a module with their paths, itself last."""
    is_part = lambda x: isinstance(x, eqx.Module) and x is not module  # noqa: E731
    for path, part in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_part):
        if isinstance(part, eqx.Module):
            yield from ((path + inner, x) for inner, x in iter_modules(part))
    yield (), module


def name_in_source(model, path):
    """Returns the name of an array in the source's state dict; None if it is not there."""
    steps = [*steps_to(model, path)]
    if not all(settings_of(*step).get("saved", True) for step in steps):
        return None
    return ".".join(str(name) for owner, name in steps if name != getattr(owner, "inside", None))


def set_part(owner, name, value):
    """Gives a part of a model that is still being made another array or module."""
    if isinstance(owner, eqx.Module):
        object.__setattr__(owner, name, value)
    else:
        owner[name] = value


def settings_of(owner, name):
    """Returns how a field of a module is declared."""
    return type(owner).__dataclass_fields__[name].metadata if isinstance(owner, eqx.Module) else {}


def steps_to(model, path):
    """Yields the parts on a key path, and the name or number of the next one in each."""
    owner = model
    for step in path:
        name = next(getattr(step, kind) for kind in ("name", "key", "idx") if hasattr(step, kind))
        yield owner, name
        owner = getattr(owner, name) if isinstance(owner, eqx.Module) else owner[name]


def trunc_normal_init(mean=0.0, std=1.0, a=-2.0, b=2.0):
    """Returns an initializer that draws from a normal distribution between a and b."""

    def init(key, shape, dtype=jnp.float32):
        low, high = (a - mean) / std, (b - mean) / std
        return mean + std * jax.random.truncated_normal(key, low, high, shape, dtype)

    return init


def trunc_normal_(tensor, mean=0.0, std=1.0, *, key):
    keys = Keys(key)
    initialize(*tensor, trunc_normal_init(mean=mean, std=std), keys())


class DWConv(eqx.Module):
    dwconv: Conv2d

    def __init__(self, dim=768, *, key):
        keys = Keys(key)
        self.dwconv = Conv2d(dim, dim, 3, 1, 1, bias=True, groups=dim, key=keys())

    def __call__(self, x, H, W):
        B, N, C = x.shape
        x = x.swapaxes(1, 2).reshape(B, C, H, W)
        x = self.dwconv(x)
        x = x.reshape(x.shape[0], x.shape[1], -1).swapaxes(1, 2)

        return x


class Mlp(eqx.Module):
    fc1: Linear
    dwconv: DWConv
    act: Callable
    fc2: Linear
    drop: eqx.nn.Dropout

    def __init__(
        self, in_features, hidden_features=None, out_features=None, act_layer=GELU, drop=0.0, *, key
    ):
        keys = Keys(key)
        out_features = out_features or in_features
        hidden_features = hidden_features or in_features
        self.fc1 = Linear(in_features, hidden_features, key=keys())
        self.dwconv = DWConv(hidden_features, key=keys())
        self.act = act_layer()
        self.fc2 = Linear(hidden_features, out_features, key=keys())
        self.drop = eqx.nn.Dropout(drop)

        for _, module in iter_modules(self):
            self._init_weights(module, key=keys())

    def _init_weights(self, m, *, key):
        keys = Keys(key)
        if isinstance(m, Linear):
            trunc_normal_(Place(m, "weight"), std=0.02, key=keys())
            if isinstance(m, Linear) and m.bias is not None:
                set_part(m, "bias", jnp.full_like(m.bias, 0))
        elif isinstance(m, LayerNorm):
            set_part(m, "bias", jnp.full_like(m.bias, 0))
        elif isinstance(m, Conv2d):
            fan_out = m.kernel_size[0] * m.kernel_size[1] * m.out_channels
            fan_out //= m.groups
            initialize(m, "weight", jax.nn.initializers.normal(math.sqrt(2.0 / fan_out)), keys())
            if m.bias is not None:
                set_part(m, "bias", jnp.zeros_like(m.bias))

    def __call__(self, x, H, W, *, key=None):
        keys = Keys(key)
        x = self.fc1(x)
        x = self.dwconv(x, H, W)
        x = self.act(x)
        x = self.drop(x, key=keys())
        x = self.fc2(x)
        x = self.drop(x, key=keys())
        return x


class Attention(eqx.Module):
    dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    q: Linear
    kv: Linear
    attn_drop: eqx.nn.Dropout
    proj: Linear
    proj_drop: eqx.nn.Dropout
    sr_ratio: int = eqx.field(static=True)
    sr: Conv2d = None
    norm: LayerNorm = None

    def __init__(
        self,
        dim,
        num_heads=8,
        qkv_bias=False,
        qk_scale=None,
        attn_drop=0.0,
        proj_drop=0.0,
        sr_ratio=1,
        *,
        key,
    ):
        keys = Keys(key)
        assert dim % num_heads == 0, f"dim {dim} should be divided by num_heads {num_heads}."

        self.dim = dim
        self.num_heads = num_heads
        head_dim = dim // num_heads
        self.scale = qk_scale or head_dim ** (-0.5)

        self.q = Linear(dim, dim, bias=qkv_bias, key=keys())
        self.kv = Linear(dim, dim * 2, bias=qkv_bias, key=keys())
        self.attn_drop = eqx.nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim, key=keys())
        self.proj_drop = eqx.nn.Dropout(proj_drop)

        self.sr_ratio = sr_ratio
        if sr_ratio > 1:
            self.sr = Conv2d(dim, dim, kernel_size=sr_ratio, stride=sr_ratio, key=keys())
            self.norm = LayerNorm(dim)

    def __call__(self, x, H, W, *, key=None):
        keys = Keys(key)
        B, N, C = x.shape
        q = self.q(x).reshape(B, N, self.num_heads, C // self.num_heads).swapaxes(1, 2)

        if self.sr_ratio > 1:
            x_ = x.swapaxes(-2, -1).reshape(B, C, H, W)
            x_ = self.sr(x_).reshape(B, C, -1).swapaxes(-2, -1)
            x_ = self.norm(x_)
            kv = (
                self.kv(x_)
                .reshape(B, -1, 2, self.num_heads, C // self.num_heads)
                .transpose(2, 0, 3, 1, 4)
            )
        else:
            kv = (
                self.kv(x)
                .reshape(B, -1, 2, self.num_heads, C // self.num_heads)
                .transpose(2, 0, 3, 1, 4)
            )
        k, v = kv[0], kv[1]

        attn = q @ k.swapaxes(-2, -1) * self.scale
        attn = jax.nn.softmax(attn, axis=-1)
        attn = self.attn_drop(attn, key=keys())

        x = (attn @ v).swapaxes(1, 2).reshape(B, N, C)
        x = self.proj(x)
        x = self.proj_drop(x, key=keys())

        return x


class DropPath(eqx.Module):
    """Drop paths (Stochastic Depth) per sample (when applied in main path of residual blocks)."""

    drop_prob: float = eqx.field(static=True)
    inference: bool  # set by eqx.nn.inference_mode

    def __init__(self, drop_prob=0.0):
        self.drop_prob = drop_prob
        self.inference = False

    def __call__(self, x, *, key=None):
        keys = Keys(key)
        if self.drop_prob == 0.0 or self.inference:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        random_tensor = jax.random.bernoulli(keys(), keep_prob, (*shape,)).astype(jnp.float32)
        return x * random_tensor / keep_prob


class Block(eqx.Module):
    norm1: LayerNorm
    attn: Attention
    drop_path: Callable | DropPath
    norm2: LayerNorm
    mlp: Mlp

    def __init__(
        self, dim, num_heads, mlp_ratio=4.0, drop_path=0.0, sr_ratio=1, norm_layer=LayerNorm, *, key
    ):
        keys = Keys(key)
        self.norm1 = norm_layer(dim)
        self.attn = Attention(
            dim, num_heads=num_heads, qkv_bias=True, sr_ratio=sr_ratio, key=keys()
        )
        # NOTE: drop path for stochastic depth, we shall see if this is better than dropout here
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else eqx.nn.Identity()
        self.norm2 = norm_layer(dim)
        mlp_hidden_dim = int(dim * mlp_ratio)
        self.mlp = Mlp(in_features=dim, hidden_features=mlp_hidden_dim, key=keys())

    def __call__(self, x, H, W, *, key=None):
        keys = Keys(key)
        x = x + self.drop_path(self.attn(self.norm1(x), H, W, key=keys()), key=keys())
        x = x + self.drop_path(self.mlp(self.norm2(x), H, W, key=keys()), key=keys())

        return x


class OverlapPatchEmbed(eqx.Module):
    """Image to Patch Embedding"""

    proj: Conv2d
    norm: LayerNorm

    def __init__(self, patch_size=7, stride=4, in_chans=3, embed_dim=768, *, key):
        keys = Keys(key)
        self.proj = Conv2d(
            in_chans,
            embed_dim,
            kernel_size=patch_size,
            stride=stride,
            padding=(patch_size // 2, patch_size // 2),
            key=keys(),
        )
        self.norm = LayerNorm(embed_dim)

    def __call__(self, x):
        x = self.proj(x)
        _, _, H, W = x.shape
        x = x.reshape(x.shape[0], x.shape[1], -1).swapaxes(1, 2)
        x = self.norm(x)

        return x, H, W


class SegFormer(eqx.Module):
    depths: tuple = eqx.field(static=True)
    patch_embeds: list[OverlapPatchEmbed]
    blocks: list[list[Block]]
    norms: list[LayerNorm]
    linears: list[Linear]
    linear_fuse: Conv2d
    linear_pred: Conv2d

    def __init__(
        self,
        embed_dims=(8, 16),
        num_heads=(1, 2),
        depths=(1, 2),
        sr_ratios=(2, 1),
        drop_path_rate=0.1,
        num_classes=4,
        decoder_dim=8,
        *,
        key,
    ):
        keys = Keys(key)
        self.depths = depths
        dpr = [x.item() for x in np.linspace(0, drop_path_rate, sum(depths))]  # decay rule
        self.patch_embeds = []
        self.blocks = []
        self.norms = []
        cur = 0
        for i, (dim, heads, depth, sr) in enumerate(zip(embed_dims, num_heads, depths, sr_ratios)):
            self.patch_embeds.append(
                OverlapPatchEmbed(
                    patch_size=7 if i == 0 else 3,
                    stride=4 if i == 0 else 2,
                    in_chans=3 if i == 0 else embed_dims[i - 1],
                    embed_dim=dim,
                    key=keys(),
                )
            )
            self.blocks.append(
                [
                    Block(dim, heads, drop_path=dpr[cur + j], sr_ratio=sr, key=keys())
                    for j in range(depth)
                ]
            )
            self.norms.append(LayerNorm(dim))
            cur += depth
        self.linears = [Linear(dim, decoder_dim, key=keys()) for dim in embed_dims]
        self.linear_fuse = Conv2d(
            decoder_dim * len(embed_dims), decoder_dim, kernel_size=1, key=keys()
        )
        self.linear_pred = Conv2d(decoder_dim, num_classes, kernel_size=1, key=keys())

    def forward_features(self, x, *, key=None):
        keys = Keys(key)
        B = x.shape[0]
        outs = []
        for patch_embed, blocks, norm in zip(self.patch_embeds, self.blocks, self.norms):
            x, H, W = patch_embed(x)
            for blk in blocks:
                x = blk(x, H, W, key=keys())
            x = norm(x)
            x = x.reshape(B, H, W, -1).transpose(0, 3, 1, 2)
            outs.append(x)
        return outs

    def __call__(self, x, *, key=None):
        keys = Keys(key)
        outs = self.forward_features(x, key=keys())
        size = outs[0].shape[2:]
        maps = []
        for linear, c in zip(self.linears, outs):
            n, _, h, w = c.shape
            c = (
                linear(c.reshape(c.shape[0], c.shape[1], -1).swapaxes(1, 2))
                .swapaxes(-2, -1)
                .reshape(n, -1, h, w)
            )
            c = interpolate(c, size=size, mode="bilinear", align_corners=False)
            maps.append(c)
        x = self.linear_fuse(jnp.concatenate(maps, axis=1))
        return self.linear_pred(jax.nn.relu(x))


TIED = {}  # names in the source's state -> those here


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
