"""ResNet for Equinox, transcribed from models.repositories.resnet.

Parameters begin with the values of layers, not with those of the source in ResNet.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from typing import Any
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from collections.abc import Callable


def adaptive_avg_pool(x, sizes):
    """Takes means over the last axes of bins of nearly the same size."""
    for axis, count in enumerate(sizes, x.ndim - len(sizes)):
        size = x.shape[axis]
        ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        means = [jax.lax.slice_in_dim(x, *e, axis=axis).mean(axis, keepdims=True) for e in ends]
        x = jnp.concatenate(means, axis)
    return x


def ntuple(size: Any, count: int) -> tuple[Any, ...]:
    """Returns a size for each dimension, where one may stand for all."""
    return (size,) * count if isinstance(size, int | float) else tuple(size)


class AdaptiveAvgPool2d(eqx.Module):
    """The means of an image's parts."""

    size: tuple[int, ...]

    def __init__(self, output_size):
        self.size = ntuple(output_size, 2)

    def __call__(self, x):
        if self.size == (1, 1):
            return x.mean(axis=(-2, -1), keepdims=True)
        sizes = zip(self.size, x.shape[-2:], strict=True)
        return adaptive_avg_pool(x, [size or same for size, same in sizes])


def batch_norm(x, eps, weight=None, bias=None, mean=None, var=None):
    """Normalises the channels, which come second, by statistics that are given or their own."""
    axes, shape = (0, *range(2, x.ndim)), (-1, *(1,) * (x.ndim - 2))
    mean = x.mean(axes) if mean is None else mean
    var = x.var(axes) if var is None else var
    y = (x - mean.reshape(shape)) * jax.lax.rsqrt(var + eps).reshape(shape)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def buffer(*, saved=True, **options):
    """Declares an array that is not trained, and whether the source's state dict has it."""
    return eqx.field(metadata={"trained": False, "saved": saved}, **options)


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


class Keys:
    """Gives a new random key at each call; None where it was made with None."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        if self.key is None:
            return None
        self.key, new = jax.random.split(self.key)
        return new


class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __init__(self, in_features, out_features, bias=True, *, key):
        super().__init__(in_features, out_features, use_bias=bias, key=key)

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


def max_pool(x, window, strides, padding=0, ceil_mode=False):
    """Takes the largest element of windows over the last axes."""
    return over_windows(x, -jnp.inf, jax.lax.max, window, strides, padding, ceil_mode)


class MaxPool2d(eqx.Module):
    """The largest values of windows of an image."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    def __init__(
        self,
        kernel_size,
        stride=None,
        padding=0,
        dilation=1,
        return_indices=False,
        ceil_mode=False,
    ):
        if ntuple(dilation, 2) != (1, 1) or return_indices:
            raise ValueError("a dilation, or indices")
        self.kernel_size, self.stride = ntuple(kernel_size, 2), ntuple(stride or kernel_size, 2)
        self.padding, self.dilation, self.ceil_mode = ntuple(padding, 2), (1, 1), ceil_mode

    def __call__(self, x):
        return max_pool(
            x, self.kernel_size, self.stride, padding=self.padding, ceil_mode=self.ceil_mode
        )


def call_part(part, *args, key=None, statistics=None, **options):
    """Calls a part of a model with a random key and statistics, if it takes them."""
    names = inspect.signature(type(part).__call__).parameters
    if "key" in names or isinstance(part, eqx.nn.Dropout):
        options["key"] = key
    if "statistics" in names:
        options["statistics"] = statistics
    return part(*args, **options)


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


def initialize(owner, name, init, key):
    """Gives an array of a model that is still being made the values of an initializer."""
    array = Place(owner, name)
    set_part(owner, name, init(key, array.shape, array.dtype))


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


def over_windows(x, start, function, window, strides, padding=0, ceil_mode=False):
    """Reduces windows over the last axes; with ceil_mode the last one may reach beyond the end."""
    first = (1,) * (x.ndim - len(window))
    padding = (padding,) * len(window) if isinstance(padding, int) else padding
    pads = [(0, 0)] * len(first)
    for size, k, s, p in zip(x.shape[len(first) :], window, strides, padding):
        extra = -(size + 2 * p - k) % s if ceil_mode else 0
        begins_inside = (size + 2 * p - k + extra) // s * s < size + p
        pads.append((p, p + extra * begins_inside))
    return jax.lax.reduce_window(x, start, function, (*first, *window), (*first, *strides), pads)


def conv3x3(in_planes, out_planes, stride=1, groups=1, dilation=1, *, key):
    """3x3 convolution with padding"""
    keys = Keys(key)
    return Conv2d(
        in_planes,
        out_planes,
        kernel_size=3,
        stride=stride,
        padding=dilation,
        groups=groups,
        bias=False,
        dilation=dilation,
        key=keys(),
    )


def conv1x1(in_planes, out_planes, stride=1, *, key):
    """1x1 convolution"""
    keys = Keys(key)
    return Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False, key=keys())


class Bottleneck(eqx.Module):
    expansion = 4

    conv1: Conv2d
    bn1: BatchNorm2d
    conv2: Conv2d
    bn2: BatchNorm2d
    conv3: Conv2d
    bn3: BatchNorm2d
    relu: Callable
    downsample: Sequential | None
    stride: int = eqx.field(static=True)

    def __init__(
        self,
        inplanes,
        planes,
        stride=1,
        downsample=None,
        groups=1,
        base_width=64,
        dilation=1,
        norm_layer=None,
        *,
        key,
    ):
        keys = Keys(key)
        if norm_layer is None:
            norm_layer = BatchNorm2d
        width = int(planes * (base_width / 64.0)) * groups
        # Both self.conv2 and self.downsample layers downsample the input when stride != 1
        self.conv1 = conv1x1(inplanes, width, key=keys())
        self.bn1 = norm_layer(width)
        self.conv2 = conv3x3(width, width, stride, groups, dilation, key=keys())
        self.bn2 = norm_layer(width)
        self.conv3 = conv1x1(width, planes * self.expansion, key=keys())
        self.bn3 = norm_layer(planes * self.expansion)
        self.relu = jax.nn.relu
        self.downsample = downsample
        self.stride = stride

    def __call__(self, x, *, statistics=None):
        identity = x

        out = self.conv1(x)
        out = self.bn1(out, statistics=statistics)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out, statistics=statistics)
        out = self.relu(out)

        out = self.conv3(out)
        out = self.bn3(out, statistics=statistics)

        if self.downsample is not None:
            identity = self.downsample(x, statistics=statistics)

        out += identity
        out = self.relu(out)

        return out


class ResNet(eqx.Module):
    _norm_layer: Any = eqx.field(static=True)
    inplanes: int = eqx.field(static=True)
    dilation: int = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    base_width: int = eqx.field(static=True)
    conv1: Conv2d
    bn1: BatchNorm2d
    relu: Callable
    maxpool: MaxPool2d
    layer1: Sequential
    layer2: Sequential
    layer3: Sequential
    layer4: Sequential
    avgpool: AdaptiveAvgPool2d
    fc: Linear

    def __init__(
        self,
        block,
        layers,
        num_classes=1000,
        zero_init_residual=False,
        groups=1,
        width_per_group=64,
        replace_stride_with_dilation=None,
        norm_layer=None,
        width=64,
        *,
        key,
    ):
        keys = Keys(key)
        if norm_layer is None:
            norm_layer = BatchNorm2d
        self._norm_layer = norm_layer

        self.inplanes = width
        self.dilation = 1
        if replace_stride_with_dilation is None:
            # each element in the tuple indicates if we should replace
            # the 2x2 stride with a dilated convolution instead
            replace_stride_with_dilation = [False, False, False]
        if len(replace_stride_with_dilation) != 3:
            raise ValueError(
                f"replace_stride_with_dilation should be None or a 3-element tuple, got {replace_stride_with_dilation}"
            )
        self.groups = groups
        self.base_width = width_per_group
        self.conv1 = Conv2d(
            3, self.inplanes, kernel_size=7, stride=2, padding=3, bias=False, key=keys()
        )
        self.bn1 = norm_layer(self.inplanes)
        self.relu = jax.nn.relu
        self.maxpool = MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(block, width, layers[0], key=keys())
        self.layer2 = self._make_layer(
            block,
            width * 2,
            layers[1],
            stride=2,
            dilate=replace_stride_with_dilation[0],
            key=keys(),
        )
        self.layer3 = self._make_layer(
            block,
            width * 4,
            layers[2],
            stride=2,
            dilate=replace_stride_with_dilation[1],
            key=keys(),
        )
        self.layer4 = self._make_layer(
            block,
            width * 8,
            layers[3],
            stride=2,
            dilate=replace_stride_with_dilation[2],
            key=keys(),
        )
        self.avgpool = AdaptiveAvgPool2d((1, 1))
        self.fc = Linear(width * 8 * block.expansion, num_classes, key=keys())

        for _, m in iter_modules(self):
            if isinstance(m, Conv2d):
                initialize(
                    m,
                    "weight",
                    jax.nn.initializers.variance_scaling(
                        2.0, "fan_out", "normal", in_axis=1, out_axis=0
                    ),
                    keys(),
                )
            elif isinstance(m, BatchNorm2d):
                set_part(m, "weight", jnp.full_like(m.weight, 1))
                set_part(m, "bias", jnp.full_like(m.bias, 0))

        # Zero-initialize the last BN in each residual branch,
        # so that the residual branch starts with zeros, and each block behaves like an identity.
        if zero_init_residual:
            for _, m in iter_modules(self):
                raise NotImplementedError(
                    "the source does something else here, which no example has shown"
                )

    def _make_layer(self, block, planes, blocks, stride=1, dilate=False, *, key):
        keys = Keys(key)
        norm_layer = self._norm_layer
        downsample = None
        previous_dilation = self.dilation
        if dilate:
            self.dilation *= stride
            stride = 1
        if stride != 1 or self.inplanes != planes * block.expansion:
            downsample = Sequential(
                conv1x1(self.inplanes, planes * block.expansion, stride, key=keys()),
                norm_layer(planes * block.expansion),
            )

        layers = []
        layers.append(
            block(
                self.inplanes,
                planes,
                stride,
                downsample,
                self.groups,
                self.base_width,
                previous_dilation,
                norm_layer,
                key=keys(),
            )
        )
        self.inplanes = planes * block.expansion
        for _ in range(1, blocks):
            layers.append(
                block(
                    self.inplanes,
                    planes,
                    groups=self.groups,
                    base_width=self.base_width,
                    dilation=self.dilation,
                    norm_layer=norm_layer,
                    key=keys(),
                )
            )

        return Sequential(*layers)

    def __call__(self, x, *, statistics=None):
        x = self.conv1(x)
        x = self.bn1(x, statistics=statistics)
        x = self.relu(x)
        x = self.maxpool(x)

        x = self.layer1(x, statistics=statistics)
        x = self.layer2(x, statistics=statistics)
        x = self.layer3(x, statistics=statistics)
        x = self.layer4(x, statistics=statistics)

        x = self.avgpool(x)
        x = x.reshape(x.shape[0], -1)
        x = self.fc(x)

        return x


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


class Statistics:
    """The statistics of batches that the layers of a model collect in calls in training.

    Make it of the model, inside of the function that is differentiated or compiled, pass it to the
    call, and go on with what `update` returns:

        statistics = Statistics(model)
        y = model(x, statistics=statistics)
        model = statistics.update()
    """

    def __init__(self, model):
        self.model, self.layers = model, {id(part): part for _, part in iter_modules(model)}

    def __getitem__(self, layer):
        if id(layer) not in self.layers:
            raise ValueError(
                "a layer is not one of the model that the statistics were made of, but a copy: "
                "make them inside of the function that is differentiated or compiled"
            )
        return self.layers[id(layer)]

    def __setitem__(self, layer, new):
        self.layers[id(layer)] = new

    def update(self):
        """Returns the model with the new statistics."""
        new = {at: layer for at, layer in self.layers.items() if id(layer) != at}
        return jax.tree.map(lambda x: new.get(id(x), x), self.model, is_leaf=lambda x: id(x) in new)
