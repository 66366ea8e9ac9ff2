"""CNN for PyTorch, transcribed from models.linen_repositories.cnn"""

import math

import torch
import torch.nn.functional as F
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


def ones_init():
    """Returns an initializer that gives ones."""
    return torch.ones


def zeros_init():
    """Returns an initializer that gives zeros."""
    return torch.zeros


class BatchNorm(nn.Module):
    """Normalisation of batches with the channels last, and Flax's averages."""

    source_arrays = {
        "weight": ("scale", None),
        "running_mean": ("mean", None),
        "running_var": ("var", None),
    }

    def __init__(
        self,
        num_features,
        use_running_average=False,
        momentum=0.99,
        epsilon=1e-5,
        use_bias=True,
        use_scale=True,
        bias_init=None,
        scale_init=None,
    ):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight = nn.Parameter((scale_init or ones_init())(num_features)) if use_scale else None
        self.bias = nn.Parameter((bias_init or zeros_init())(num_features)) if use_bias else None
        self.running_mean = nn.Buffer(torch.zeros(num_features))
        self.running_var = nn.Buffer(torch.ones(num_features))
        self.training = not use_running_average

    def forward(self, x, use_running_average=None, *, mask=None):
        is_still = not self.training if use_running_average is None else use_running_average
        mean, var = self.running_mean, self.running_var
        if not is_still:
            axes = tuple(range(x.ndim - 1))
            mean, var = x.mean(axes), x.var(axes, correction=0)
            if mask is not None:
                shown = mask.to(x.dtype).broadcast_to(x.shape)
                mean = (x * shown).sum(axes) / shown.sum(axes)
                var = ((x - mean).square() * shown).sum(axes) / shown.sum(axes)
            with torch.no_grad():
                self.running_mean.lerp_(mean, 1 - self.momentum)
                self.running_var.lerp_(var, 1 - self.momentum)
        scale = torch.rsqrt(var + self.epsilon)
        y = (x - mean) * (scale if self.weight is None else scale * self.weight)
        return y if self.bias is None else y + self.bias


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


class LazyBatchNorm(Lazy):
    """See `BatchNorm`."""

    kind = BatchNorm


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


class LazyConv(Lazy):
    """See `Conv`."""

    kind = Conv


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


def avg_pool(x, window_shape, strides=None, padding="VALID"):
    """Returns the means of windows, with the channels last; elements put at the ends count."""
    strides = strides or (1,) * len(window_shape)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(window_shape) - 1]
    x = pad(x.movedim(-1, 1), pads_of(x.shape[1:-1], window_shape, strides, padding))
    return pool(x, window_shape, strides).movedim(1, -1)


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


class CNN(nn.Module):
    """Classifies images."""

    def __init__(self, num_classes: int = 10, use_bias: bool = True):
        super().__init__()
        self.num_classes = num_classes
        self.use_bias = use_bias
        self.Conv_0 = LazyConv(features=8, kernel_size=(3, 3))
        self.BatchNorm_0 = LazyBatchNorm(momentum=0.9)
        self.Conv_1 = LazyConv(features=16, kernel_size=(3, 3), use_bias=self.use_bias)
        self.BatchNorm_1 = LazyBatchNorm()
        self.Dense_0 = LazyLinear(features=32)
        self.Dropout_0 = Dropout(rate=0.2)
        self.Dense_1 = LazyLinear(features=self.num_classes)

    def forward(self, x, train: bool):
        x = self.Conv_0(x)
        x = self.BatchNorm_0(x, use_running_average=not train)
        x = F.relu(x)
        x = avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = self.Conv_1(x)
        x = self.BatchNorm_1(x, use_running_average=not train)
        x = F.relu(x)
        x = avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)  # flatten
        x = self.Dense_0(x)
        x = F.relu(x)
        x = self.Dropout_0(x, deterministic=not train)
        return self.Dense_1(x)


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
