"""MlpMixer for PyTorch, transcribed from models.nnx_repositories.mixer"""

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


def ones_init():
    """Returns an initializer that gives ones."""
    return torch.ones


def zeros_init():
    """Returns an initializer that gives zeros."""
    return torch.zeros


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


def lecun_normal(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances."""
    return variance_scaling(1.0, "fan_in", "truncated_normal", in_axis, out_axis)


class Linear(nn.Linear):
    """A linear layer with Flax's arguments and initial values."""

    source_arrays = {"weight": ("kernel", (1, 0))}

    def __init__(self, in_features, out_features, use_bias=True, kernel_init=None, bias_init=None):
        super().__init__(in_features, out_features, bias=use_bias)
        fill(self, "weight", kernel_init or lecun_normal())
        fill(self, "bias", bias_init or zeros_init())


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


class DropPath(nn.Module):
    """Leaves a branch out for some of the samples."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        mask = torch.rand(shape, device=x.device) < keep
        return torch.where(mask, x / keep, 0.0)


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.fc2 = Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int, rate: float):
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.token_mlp = Mlp(tokens, 2 * tokens)
        self.norm2 = LayerNorm(dim)
        self.channel_mlp = Mlp(dim, 4 * dim)
        self.drop_path = DropPath(rate)
        self.scale = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x):
        y = self.norm1(x).transpose(1, 2)
        y = self.token_mlp(y).transpose(1, 2)
        x = x + self.drop_path(y * self.scale)
        return x + self.drop_path(self.channel_mlp(self.norm2(x)))


class MlpMixer(nn.Module):
    def __init__(self, image=32, patch=4, dim=128, depth=4, num_classes=10, drop_path=0.1):
        super().__init__()
        self.patch = patch
        tokens = (image // patch) ** 2
        self.stem = Linear(3 * patch * patch, dim)
        rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.ModuleList([MixerBlock(tokens, dim, r) for r in rates])
        self.norm = LayerNorm(dim)
        self.head = Linear(dim, num_classes, kernel_init=zeros_init())

    def forward(self, x):
        B, H, W, C = x.shape
        p = self.patch
        x = x.reshape(B, H // p, p, W // p, p, C)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(B, -1, p * p * C)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


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
