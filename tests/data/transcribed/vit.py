"""VisionTransformer for PyTorch, transcribed from models.nnx_repositories.vit"""

import math

import torch
import torch.nn.functional as F
from torch import nn


def fill(layer, name, init):
    """Gives an array of a layer the values of an initializer, if the layer has it."""
    array = getattr(layer, name)
    if array is None:
        return
    _, axes = getattr(layer, "source_arrays", {}).get(name, (name, None))
    axes = axes or tuple(range(array.ndim))
    shape = [array.shape[axes.index(axis)] for axis in range(array.ndim)]
    with torch.no_grad():
        array.copy_(init(shape).permute(axes))


def lecun_normal(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances."""
    return variance_scaling(1.0, "fan_in", "truncated_normal", in_axis, out_axis)


def pad(x, pairs, value=0.0):
    """Puts elements before and after each dimension, or but the first ones."""
    return F.pad(x, [size for pair in reversed(pairs) for size in pair], value=value)


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


def repeat(size, count):
    """Returns a size for each dimension, where one may stand for all."""
    return (size,) * count if isinstance(size, int) else tuple(size)


def zeros_init():
    """Returns an initializer that gives zeros."""
    return torch.zeros


class Conv(nn.Module):
    """A convolution with the channels last, and Flax's arguments and initial values."""

    def __init__(
        self,
        in_features,
        out_features,
        kernel_size,
        strides=1,
        *,
        padding="SAME",
        kernel_dilation=1,
        feature_group_count=1,
        use_bias=True,
        kernel_init=None,
        bias_init=None,
    ):
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


def ones_init():
    """Returns an initializer that gives ones."""
    return torch.ones


class LayerNorm(nn.LayerNorm):
    """Normalisation of the last dimension with Flax's arguments."""

    source_arrays = {"weight": ("scale", None)}

    def __init__(
        self,
        num_features,
        epsilon=1e-6,
        use_bias=True,
        use_scale=True,
        bias_init=None,
        scale_init=None,
    ):
        super().__init__(num_features, eps=epsilon, bias=use_bias)
        fill(self, "weight", scale_init or ones_init())
        fill(self, "bias", bias_init or zeros_init())
        if not use_scale:
            self.weight = None


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


class MultiHeadAttention(nn.Module):
    """Attention of several heads with Flax's arguments and layouts."""

    def __init__(
        self,
        num_heads,
        in_features,
        qkv_features=None,
        out_features=None,
        dropout_rate=0.0,
        deterministic=False,
        kernel_init=None,
        out_kernel_init=None,
        bias_init=None,
        out_bias_init=None,
        use_bias=True,
        decode=False,
        broadcast_dropout=True,
    ):
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
            heads,
            out_features or in_features,
            (-2, -1),
            use_bias,
            out_kernel_init or kernel_init,
            out_bias_init or bias_init,
        )
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


def trunc_normal_init(stddev=1e-2, lower=-2.0, upper=2.0):
    """Returns an initializer that draws from a normal distribution between two deviations."""
    return lambda shape: nn.init.trunc_normal_(torch.empty(shape), a=lower, b=upper) * stddev


def xavier_uniform(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances in both directions."""
    return variance_scaling(1.0, "fan_avg", "uniform", in_axis, out_axis)


def variance_scaling(scale, mode, distribution, in_axis=-2, out_axis=-1):
    """Returns an initializer whose variance depends on how many inputs and outputs there are."""

    def init(shape):
        fan_in, fan_out = (math.prod(shape) / shape[axis] for axis in (out_axis, in_axis))
        fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
        std = math.sqrt(scale / max(1.0, fans[mode]))
        if distribution == "uniform":
            return (torch.rand(shape) * 2 - 1) * math.sqrt(3) * std
        if distribution == "normal":
            return torch.randn(shape) * std
        return trunc_normal_init(std / 0.87962566103423978)(shape)

    return init


class PatchEmbed(nn.Module):
    """Image to patches."""

    def __init__(self, img_size=224, patch_size=16, in_chans=3, embed_dim=768):
        super().__init__()
        self.grid_size = img_size // patch_size
        self.num_patches = self.grid_size**2
        self.proj = Conv(
            in_chans,
            embed_dim,
            kernel_size=(patch_size, patch_size),
            strides=(patch_size, patch_size),
            padding="VALID",
        )

    def forward(self, x):
        x = self.proj(x)
        batch, height, width, dim = x.shape
        return x.reshape(batch, height * width, dim)


class MlpBlock(nn.Module):
    def __init__(self, dim: int, hidden: int, rate: float = 0.0):
        super().__init__()
        self.fc1 = Linear(dim, hidden, kernel_init=xavier_uniform())
        self.fc2 = Linear(hidden, dim, kernel_init=xavier_uniform())
        self.drop = Dropout(rate)

    def forward(self, x, *, deterministic: bool = True):
        x = F.gelu(self.fc1(x))
        x = self.drop(x, deterministic=deterministic)
        return self.drop(self.fc2(x), deterministic=deterministic)


class EncoderBlock(nn.Module):
    def __init__(self, dim, num_heads, mlp_ratio=4.0, rate=0.0):
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.attn = MultiHeadAttention(
            num_heads=num_heads, in_features=dim, dropout_rate=rate, decode=False
        )
        self.norm2 = LayerNorm(dim)
        self.mlp = MlpBlock(dim, int(dim * mlp_ratio), rate)

    def forward(self, x, *, deterministic: bool = True):
        x = x + self.attn(self.norm1(x), deterministic=deterministic)
        return x + self.mlp(self.norm2(x), deterministic=deterministic)


class VisionTransformer(nn.Module):
    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        pool: str = "cls",
    ):
        super().__init__()
        self.pool = pool
        self.patch_embed = PatchEmbed(img_size, patch_size, 3, embed_dim)
        num_patches = self.patch_embed.num_patches
        self.cls_token = nn.Parameter(torch.zeros((1, 1, embed_dim)))
        init = trunc_normal_init(0.02)
        self.pos_embed = nn.Parameter(init((1, num_patches + 1, embed_dim)))
        self.blocks = nn.ModuleList([EncoderBlock(embed_dim, num_heads) for _ in range(depth)])
        self.norm = LayerNorm(embed_dim, epsilon=1e-06)
        self.head = Linear(embed_dim, num_classes)

    def forward(self, x: torch.Tensor, *, deterministic: bool = True) -> torch.Tensor:
        x = self.patch_embed(x)
        cls_token = self.cls_token.broadcast_to((x.shape[0], 1, x.shape[-1]))
        x = torch.cat([cls_token, x], dim=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x, deterministic=deterministic)
        x = self.norm(x)
        if self.pool == "cls":
            x = x[:, 0]
        else:
            x = x[:, 1:].mean(dim=1)
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
