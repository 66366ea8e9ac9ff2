"""CNN for PyTorch, transcribed from models.equinox_repositories.cnn"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


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
    """A convolution of one example with Equinox's arguments, initial values and biases."""

    def __init__(
        self,
        num_spatial_dims,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        use_bias=True,
        padding_mode="ZEROS",
    ):
        super().__init__()
        rank, self.groups, self.padding = num_spatial_dims, groups, padding
        self.kernel_size, self.stride = repeat(kernel_size, rank), repeat(stride, rank)
        self.dilation, self.padding_mode = repeat(dilation, rank), padding_mode.upper()
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        limit = 1 / math.sqrt(math.prod(shape[1:]))
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-limit, limit))
        column = torch.empty(out_channels, *(1,) * rank).uniform_(-limit, limit)
        self.bias = nn.Parameter(column) if use_bias else None

    def forward(self, x):
        modes = {"ZEROS": "constant", "REPLICATE": "replicate", "CIRCULAR": "circular"}
        pads = pads_of(x.shape[1:], self.kernel_size, self.stride, self.padding, self.dilation)
        flat = [size for pair in reversed(pads) for size in pair]
        x = F.pad(x[None], flat, modes.get(self.padding_mode, "reflect"))
        conv = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        y = conv(x, self.weight, None, self.stride, 0, self.dilation, self.groups)[0]
        return y if self.bias is None else y + self.bias


def as_part(item):
    """Returns a module for a module, a function, or a list or dict of such."""
    if isinstance(item, list | tuple):
        return Parts(item)
    if isinstance(item, dict):
        return nn.ModuleDict({name: as_part(part) for name, part in item.items()})
    return item if isinstance(item, nn.Module) else Function(item)


class Parts(nn.ModuleList):
    """A list of layers and functions."""

    def __init__(self, parts=()):
        super().__init__(map(as_part, parts))

    def append(self, part):
        return super().append(as_part(part))


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


class Function(nn.Module):
    """A function in the place of a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        # Standard CNN setup: convolutional layer, followed by flattening,
        # with a small MLP on top.
        self.layers = Parts(
            [
                Conv(2, 1, 3, kernel_size=4),
                nn.MaxPool2d(kernel_size=2, stride=1),
                F.relu,
                lambda x: x.flatten(),
                nn.Linear(192, 16),
                torch.sigmoid,
                nn.Linear(16, 8),
                F.relu,
                nn.Linear(8, 4),
                partial(F.log_softmax, dim=-1),
            ]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


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
