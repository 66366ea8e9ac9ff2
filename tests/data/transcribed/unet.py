"""UNet for PyTorch, transcribed from models.nnx_repositories.unet"""

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


def ones_init():
    """Returns an initializer that gives ones."""
    return torch.ones


class GroupNorm(nn.GroupNorm):
    """Normalisation of groups of channels, which are last, with Flax's arguments."""

    source_arrays = {"weight": ("scale", None)}

    def __init__(
        self,
        num_features,
        num_groups=32,
        group_size=None,
        epsilon=1e-6,
        use_bias=True,
        use_scale=True,
        bias_init=None,
        scale_init=None,
    ):
        super().__init__(
            num_features // group_size if group_size else num_groups, num_features, epsilon
        )
        fill(self, "weight", scale_init or ones_init())
        fill(self, "bias", bias_init or zeros_init())
        self.weight = self.weight if use_scale else None
        self.bias = self.bias if use_bias else None

    def forward(self, x):
        # PyTorch 2.13 crashes in the backward pass of a channels-last input without gradient
        return super().forward(x.movedim(-1, 1).contiguous()).movedim(1, -1)


class Linear(nn.Linear):
    """A linear layer with Flax's arguments and initial values."""

    source_arrays = {"weight": ("kernel", (1, 0))}

    def __init__(self, in_features, out_features, use_bias=True, kernel_init=None, bias_init=None):
        super().__init__(in_features, out_features, bias=use_bias)
        fill(self, "weight", kernel_init or lecun_normal())
        fill(self, "bias", bias_init or zeros_init())


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


def resize(x, shape, method):
    """Returns images of another size, with the channels last."""
    modes = {"nearest": "nearest-exact", "linear": "bilinear", "bilinear": "bilinear"}
    is_nearest = method == "nearest"
    y = F.interpolate(
        x.movedim(-1, 1),
        shape[1:-1],
        mode=modes[method],
        antialias=not is_nearest,
        align_corners=None if is_nearest else False,
    )
    return y.movedim(1, -1)


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


def trunc_normal_init(stddev=1e-2, lower=-2.0, upper=2.0):
    """Returns an initializer that draws from a normal distribution between two deviations."""
    return lambda shape: nn.init.trunc_normal_(torch.empty(shape), a=lower, b=upper) * stddev


def timestep_embedding(t, dim, max_period=10000.0):
    """Sinusoidal embeddings of the steps of diffusion."""
    half = dim // 2
    freqs = torch.exp(
        -math.log(max_period) * torch.arange(0, half, dtype=torch.float32, device=t.device) / half
    )
    args = t[:, None].to(torch.float32) * freqs[None]
    emb = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
    if dim % 2:
        emb = F.pad(emb, (0, 1, 0, 0))
    return emb


class ResBlock(nn.Module):
    def __init__(self, in_ch, out_ch, emb_dim, groups=4):
        super().__init__()
        self.norm1 = GroupNorm(in_ch, num_groups=groups)
        self.conv1 = Conv(in_ch, out_ch, (3, 3))
        self.emb = Linear(emb_dim, out_ch)
        self.norm2 = GroupNorm(out_ch, num_groups=groups)
        self.conv2 = Conv(out_ch, out_ch, (3, 3), kernel_init=zeros_init())
        self.skip = Conv(in_ch, out_ch, (1, 1)) if in_ch != out_ch else None

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, None, None, :]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.skip(x) if self.skip is not None else x)


class Downsample(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv = Conv(ch, ch, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))

    def forward(self, x):
        return self.conv(x)


class Upsample(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv = Conv(ch, ch, (3, 3))

    def forward(self, x):
        B, H, W, C = x.shape
        x = resize(x, (B, H * 2, W * 2, C), method="nearest")
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, in_ch=3, base=32, mults=(1, 2), emb_dim=128):
        super().__init__()
        self.base = base
        self.time_mlp = Sequential(Linear(base, emb_dim), F.silu, Linear(emb_dim, emb_dim))
        self.stem = Conv(in_ch, base, (3, 3))
        chs = [base * m for m in mults]
        downs, ups = [], []
        ch = base
        for i, out in enumerate(chs):
            downs.append(ResBlock(ch, out, emb_dim))
            if i < len(chs) - 1:
                downs.append(Downsample(out))
            ch = out
        for i, out in reversed(list(enumerate(chs))):
            ups.append(ResBlock(ch + out, out, emb_dim))
            if i > 0:
                ups.append(Upsample(out))
            ch = out
        self.downs, self.ups = nn.ModuleList(downs), nn.ModuleList(ups)
        self.out = Conv(ch, in_ch, (3, 3))

    def forward(self, x, t):
        emb = self.time_mlp(timestep_embedding(t, self.base))
        x = self.stem(x)
        skips = []
        for layer in self.downs:
            if isinstance(layer, Downsample):
                x = layer(x)
            else:
                x = layer(x, emb)
                skips.append(x)
        for layer in self.ups:
            if isinstance(layer, Upsample):
                x = layer(x)
            else:
                x = layer(torch.cat([x, skips.pop()], dim=-1), emb)
        return self.out(F.silu(x))


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
