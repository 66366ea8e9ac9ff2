"""Arrays in files for PyTorch: initial values, and names in the source's state.

A file takes the source of what it names. Initializers take a shape in the source's layout.
"""

from __future__ import annotations

import inspect
import math

import torch
from torch import nn


def zeros_init():
    """Returns an initializer that gives zeros."""
    return torch.zeros


def ones_init():
    """Returns an initializer that gives ones."""
    return torch.ones


def constant_init(value):
    """Returns an initializer that gives one number."""
    return lambda shape: torch.zeros(shape) + value


def normal_init(stddev=1e-2):
    """Returns an initializer that draws from a normal distribution."""
    return lambda shape: torch.randn(shape) * stddev


def trunc_normal_init(stddev=1e-2, lower=-2.0, upper=2.0):
    """Returns an initializer that draws from a normal distribution between two deviations."""
    return lambda shape: nn.init.trunc_normal_(torch.empty(shape), a=lower, b=upper) * stddev


def uniform_init(scale=1e-2):
    """Returns an initializer that draws uniformly from 0 to a number."""
    return lambda shape: torch.rand(shape) * scale


def orthogonal_init(scale=1.0):
    """Returns an initializer that gives orthogonal columns, or rows."""
    return lambda shape: nn.init.orthogonal_(torch.empty(math.prod(shape[:-1]), shape[-1])).reshape(
        shape
    ) * scale  # fmt: skip


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


def lecun_normal(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances."""
    return variance_scaling(1.0, "fan_in", "truncated_normal", in_axis, out_axis)


def lecun_uniform(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances."""
    return variance_scaling(1.0, "fan_in", "uniform", in_axis, out_axis)


def he_normal(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers before rectifiers."""
    return variance_scaling(2.0, "fan_in", "truncated_normal", in_axis, out_axis)


def he_uniform(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers before rectifiers."""
    return variance_scaling(2.0, "fan_in", "uniform", in_axis, out_axis)


def xavier_normal(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances in both directions."""
    return variance_scaling(1.0, "fan_avg", "truncated_normal", in_axis, out_axis)


def xavier_uniform(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances in both directions."""
    return variance_scaling(1.0, "fan_avg", "uniform", in_axis, out_axis)


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


def follow_mode(model, flags):
    """Gives calls that lack an argument for the mode that of the module; returns the module.

    Args:
        model: The module.
        flags: Such arguments of its `forward` -> their values in training.
    """
    names = [*inspect.signature(type(model).forward).parameters][1:]
    known = [(name, names.index(name), value) for name, value in flags.items() if name in names]

    def add_mode(model, args, kwargs):
        mode = {
            name: model.training is value for name, at, value in known if at >= len(args)
        }  # fmt: skip
        return args, {**mode, **kwargs}

    if known:
        model.register_forward_pre_hook(add_mode, with_kwargs=True)
    return model
