"""Layers that files for PyTorch have beside a Linen model's classes; see `torch.layers`.

As in Linen, the first input tells a layer how many features it takes.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from fmapper_translate.torch.layers import (
    Conv,
    ConvTranspose,
    Linear,
    LinearGeneral,
    MultiHeadAttention,
    Sequential,
)
from fmapper_translate.torch.norms import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from fmapper_translate.torch.recurrent import Cell, map_tree, scan
from fmapper_translate.torch.weights import orthogonal_init


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


class LazyLinear(Lazy):
    """See `Linear`."""

    kind = Linear


class LazyLinearGeneral(Lazy):
    """See `LinearGeneral`."""

    kind = LinearGeneral

    def arguments_for(self, x):
        args, kwargs = self.given
        axes = kwargs.get("axis", args[1] if len(args) > 1 else -1)
        axes = (axes,) if isinstance(axes, int) else axes
        return (tuple(x.shape[axis] for axis in axes), *args), kwargs


class LazyConv(Lazy):
    """See `Conv`."""

    kind = Conv


class LazyConvTranspose(Lazy):
    """See `ConvTranspose`."""

    kind = ConvTranspose


class LazyLayerNorm(Lazy):
    """See `LayerNorm`."""

    kind = LayerNorm


class LazyRMSNorm(Lazy):
    """See `RMSNorm`."""

    kind = RMSNorm


class LazyGroupNorm(Lazy):
    """See `GroupNorm`."""

    kind = GroupNorm


class LazyBatchNorm(Lazy):
    """See `BatchNorm`."""

    kind = BatchNorm


class LazyInstanceNorm(Lazy):
    """See `InstanceNorm`."""

    kind = InstanceNorm


class LazyMultiHeadAttention(Lazy):
    """See `MultiHeadAttention`."""

    kind = MultiHeadAttention

    def arguments_for(self, x):
        args, kwargs = self.given
        args = [*args] or [kwargs["num_heads"]]
        rest = {name: value for name, value in kwargs.items() if name != "num_heads"}
        return (args[0], x.shape[-1], *args[1:]), rest


class LSTMCell(Cell):
    """A step of an LSTM with Flax's arguments and names."""

    states = 2

    def __init__(self, features):
        super().__init__(features)
        for gate in "ifgo":
            self.add_module(f"i{gate}", LazyLinear(features, use_bias=False))
            self.add_module(f"h{gate}", LazyLinear(features, kernel_init=orthogonal_init()))

    def forward(self, carry, x):
        c, h = carry
        parts = self._modules
        i, f, g, o = (parts[f"i{gate}"](x) + parts[f"h{gate}"](h) for gate in "ifgo")
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (c, h), h


class GRUCell(Cell):
    """A step of a GRU with Flax's arguments and names."""

    def __init__(self, features):
        super().__init__(features)
        for gate in "rzn":
            self.add_module(f"i{gate}", LazyLinear(features))
            kernel = orthogonal_init()
            self.add_module(
                f"h{gate}", LazyLinear(features, use_bias=gate == "n", kernel_init=kernel)
            )

    def forward(self, h, x):
        parts = self._modules
        r, z = (torch.sigmoid(parts[f"i{gate}"](x) + parts[f"h{gate}"](h)) for gate in "rz")
        n = torch.tanh(parts["in"](x) + r * parts["hn"](h))
        h = (1 - z) * n + z * h
        return h, h


class Layers(Sequential):
    """Layers and functions in a list that are called one after the other."""

    def __init__(self, layers):
        super().__init__(*layers)


def scan_method(in_axes=0, out_axes=0, reverse=False):
    """Has a method run for each element of its arguments but a carry; stacks what it returns."""

    def decorate(method):
        @functools.wraps(method)
        def run(self, carry, *xs):
            def step(carry, row):
                return method(self, carry, *row)

            moved = [map_tree(lambda x: x.movedim(in_axes, 0), x) for x in xs]
            carry, ys = scan(step, carry, tuple(moved), reverse=reverse)
            return carry, map_tree(lambda y: y.movedim(0, out_axes), ys)

        return run

    return decorate


def late(module, name, make):
    """Returns a part of a module that its first call makes, as sizes of arrays say."""
    if not hasattr(module, name):
        setattr(module, name, make())
    return getattr(module, name)


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
