"""MLP for PyTorch, transcribed from models.linen_repositories.mlp"""

import math
from functools import partial
from itertools import count

import torch
import torch.nn.functional as F
from collections.abc import Callable
from collections.abc import Sequence
from torch import nn


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


class Lazy(nn.Module):
    """A layer of another class, which it becomes when its first input tells how many features."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        if "features" in kwargs:
            kwargs["out_features"] = kwargs.pop("features")
        self.given = args, kwargs

    def arguments_for(self, x):
        args, kwargs = self.given
        return (x.shape[-1], *args), kwargs

    def forward(self, x, *args, **kwargs):
        (sizes, options), training = self.arguments_for(x), self.training
        self.__class__ = self.kind
        self.__init__(*sizes, **options)
        self.to(x.device).train(training)
        return self(x, *args, **kwargs)


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


def zeros_init():
    """Returns an initializer that gives zeros."""
    return torch.zeros


class Linear(nn.Linear):
    """A linear layer with Flax's arguments and initial values."""

    source_arrays = {"weight": ("kernel", (1, 0))}

    def __init__(self, in_features, out_features, use_bias=True, kernel_init=None, bias_init=None):
        super().__init__(in_features, out_features, bias=use_bias)
        fill(self, "weight", kernel_init or lecun_normal())
        fill(self, "bias", bias_init or zeros_init())


class LazyLinear(Lazy):
    """See `Linear`."""

    kind = Linear


def initialize(model, *inputs, **options):
    """Calls a model once, so that its layers have their sizes; returns it."""
    training = model.training
    with torch.no_grad():
        model.eval()(*inputs, **options)
    return model.train(training)


def named_arrays(module, path=()):
    """Yields the name of each array in the source, the tensor, and its axes there."""
    names = getattr(module, "source_arrays", {})
    for key, tensor in module.state_dict(keep_vars=True).items():
        if "." not in key:
            is_parameter = isinstance(tensor, nn.Parameter)
            name, axes, *kind = names.get(key, (key, None))
            kind = kind or ["params" if is_parameter else "batch_stats"]
            yield ".".join((*kind, *path, name)), tensor, axes
    inner = (*path, *getattr(module, "source_path", ()))
    for key, part in module.named_children():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        yield from named_arrays(
            part, (*inner[:-1], f"{inner[-1]}_{key}") if is_list else (*inner, key)
        )


def ones_init():
    """Returns an initializer that gives ones."""
    return torch.ones


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


class MLP(nn.Module):
    """Layers with an activation in between."""

    def __init__(
        self, features: Sequence[int], activation: Callable = F.relu, dropout: float = 0.1
    ):
        super().__init__()
        self.features = features
        self.activation = activation
        self.dropout = dropout
        dropout_numbers = count()
        for i, feat in enumerate(self.features):
            self.add_module(f"Dense_{i}", LazyLinear(feat))
            if i != len(self.features) - 1:
                self.add_module(f"Dropout_{next(dropout_numbers)}", Dropout(self.dropout))
        self.scale = nn.Parameter(ones_init()((self.features[-1],)))

    def forward(self, x, *, train: bool = False):
        dropout_numbers = count()
        # the last layer has no activation
        for i, feat in enumerate(self.features):
            x = getattr(self, f"Dense_{i}")(x)
            if i != len(self.features) - 1:
                x = self.activation(x)
                x = getattr(self, f"Dropout_{next(dropout_numbers)}")(x, deterministic=not train)
        scale = self.scale
        return x * scale


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
