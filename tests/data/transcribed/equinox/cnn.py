"""CNN for PyTorch, transcribed from models.equinox_repositories.cnn"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


class WithColumn(nn.Module):
    """A convolution whose bias is a column of channels."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            ones = (1,) * len(self.kernel_size)
            self.bias = nn.Parameter(self.bias.detach().reshape(-1, *ones))

    def forward(self, x):
        bias = None if self.bias is None else self.bias.flatten()
        conv = F.conv1d if len(self.kernel_size) == 1 else F.conv2d
        return conv(x, self.weight, bias, self.stride, self.padding, self.dilation, self.groups)


class Conv2d(WithColumn, nn.Conv2d):
    """See `WithColumn`."""


class Function(nn.Module):
    """A function in the place of a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Parts(nn.ModuleList):
    """A list of layers and functions."""

    def __init__(self, parts):
        super().__init__(item if isinstance(item, nn.Module) else Function(item) for item in parts)


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


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        # Standard CNN setup: convolutional layer, followed by flattening,
        # with a small MLP on top.
        self.layers = Parts(
            [
                Conv2d(1, 3, kernel_size=4),
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
