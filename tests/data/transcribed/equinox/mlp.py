"""Net for PyTorch, transcribed from models.equinox_repositories.mlp"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


class Dropout(nn.Dropout):
    """Dropout that a call may leave out."""

    def __init__(self, p=0.5, inference=False):
        super().__init__(p)
        self.training = not inference

    def forward(self, x, inference=None):
        return F.dropout(x, self.p, self.training if inference is None else not inference)


class MLP(nn.Module):
    """Linear layers with activations."""

    def __init__(
        self,
        in_size,
        out_size,
        width_size,
        depth,
        activation=F.relu,
        final_activation=None,
        use_bias=True,
        use_final_bias=True,
    ):
        super().__init__()
        sizes = [in_size, *[width_size] * depth, out_size]
        self.layers = nn.ModuleList(
            nn.Linear(sizes[i], sizes[i + 1], use_final_bias if i == depth else use_bias)
            for i in range(depth + 1)
        )
        self.activation, self.final_activation = activation, final_activation

    def forward(self, x):
        *layers, last = self.layers
        for layer in layers:
            x = self.activation(layer(x))
        x = last(x)
        return x if self.final_activation is None else self.final_activation(x)


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


def vmap(fun, in_axes=0, out_axes=0):
    """Maps a function over a dimension of its arguments, with random numbers for each element."""
    return torch.vmap(fun, in_axes, out_axes, randomness="different")


class Function(nn.Module):
    """A function in the place of a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Residual(nn.Module):
    """Adds what a layer gives."""

    def __init__(self, size, activation):
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)
        self.norm = nn.LayerNorm(size)
        self.activation = activation

    def forward(self, x):
        return x + self.activation(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, in_size, out_size, width=8, depth=2):
        super().__init__()
        (ekey, hkey, *keys) = range(depth + 2)
        self.embed = nn.Linear(in_size, width)
        self.blocks = Parts([Residual(width, partial(F.gelu, approximate="tanh")) for k in keys])
        self.dropout = Dropout(0.1)
        self.head = MLP(width, out_size, 2 * width, 1, activation=torch.tanh)
        self.extra_bias = nn.Parameter(torch.ones(out_size))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = vmap(block)(x)  # over the batch
        x = self.dropout(x)
        return self.head(x) + self.extra_bias


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
