"""The table of layers: PyTorch's classes, and what a file for Flax NNX has in their place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fmapper_translate.flax import layers as flax_layers
from fmapper_translate.flax import recurrent as flax_recurrent

Order = tuple[int, ...] | None
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Layer:
    """The counterpart of a class of PyTorch.

    Attributes:
        name: The class, as the file names it.
        names: Parameters of PyTorch's constructor -> those of this one; None for the same ones.
        defaults: Keywords of this one -> their code where PyTorch's are not given.
        attributes: PyTorch's attributes -> those of this one.
        by_place: How many arguments are given by position, where `names` says which.
        takes_rngs: Whether its constructor takes `rngs`.
        is_one_number: Parameters that are one number, where PyTorch may be given a tuple of one.
    """

    name: str
    names: Mapping[str, str] | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    by_place: int = 1
    takes_rngs: bool = True
    is_one_number: frozenset[str] = frozenset()

    @property
    def arrays(self) -> Mapping[str, tuple[str, Order]]:
        """Its variables -> PyTorch's names, and the order of the dimensions; only what differs."""
        space = {**vars(flax_recurrent), **vars(flax_layers)}
        return getattr(space.get(self.name), "source_arrays", _NONE)

    def variable(self, name: str) -> tuple[str, Order]:
        """Returns its variable for an array of PyTorch's layer, and the order of its dimensions."""
        names = {theirs: (key, order) for key, (theirs, order) in self.arrays.items()}
        return names.get(name, (name, None))

    def first(self, count: int) -> tuple[str, ...]:
        """Returns the names of the first parameters."""
        return tuple((self.names or {}).values())[:count]


_OF_CONVOLUTIONS = {
    "groups": "feature_group_count", "stride": "strides", "dilation": "kernel_dilation",
    "padding": "pads",
}  # fmt: skip
LAYERS: dict[type, Layer] = {
    nn.Linear: Layer("Linear"),
    nn.Embedding: Layer("Embedding"),
    nn.LayerNorm: Layer("LayerNorm", attributes={"eps": "epsilon"}),
    nn.Dropout: Layer(
        "nnx.Dropout", {"p": "rate"}, {"rate": "0.5"}, attributes={"p": "rate"}
    ),
    nn.Conv1d: Layer("Conv1d", attributes=_OF_CONVOLUTIONS),
    nn.Conv2d: Layer("Conv2d", attributes=_OF_CONVOLUTIONS),
    nn.Conv3d: Layer("Conv3d", attributes=_OF_CONVOLUTIONS),
    nn.ConvTranspose2d: Layer("ConvTranspose2d"),
    nn.BatchNorm1d: Layer("BatchNorm1d"),
    nn.BatchNorm2d: Layer("BatchNorm2d"),
    nn.LSTM: Layer("LSTM"),
    nn.GRU: Layer("GRU"),
    nn.LSTMCell: Layer("LSTMCell"),
    nn.GRUCell: Layer("GRUCell"),
    nn.GroupNorm: Layer("GroupNorm"),
    nn.MaxPool1d: Layer("MaxPool1d", takes_rngs=False),
    nn.MaxPool2d: Layer("MaxPool2d", takes_rngs=False),
    nn.AvgPool1d: Layer("AvgPool1d", takes_rngs=False),
    nn.AvgPool2d: Layer("AvgPool2d", takes_rngs=False),
    nn.AdaptiveAvgPool1d: Layer("AdaptiveAvgPool1d", takes_rngs=False),
    nn.AdaptiveAvgPool2d: Layer("AdaptiveAvgPool2d", takes_rngs=False),
    nn.ConstantPad1d: Layer("ConstantPad1d", takes_rngs=False),
    nn.ConstantPad2d: Layer("ConstantPad2d", takes_rngs=False),
    nn.ZeroPad2d: Layer("ConstantPad2d", takes_rngs=False),
    nn.Unfold: Layer("Unfold", takes_rngs=False),
    nn.MultiheadAttention: Layer("MultiheadAttention"),
    nn.Flatten: Layer("Flatten", takes_rngs=False),
    nn.Sequential: Layer("Sequential", takes_rngs=False),
    nn.ModuleList: Layer("nnx.List", takes_rngs=False),
    nn.ModuleDict: Layer("nnx.Dict", takes_rngs=False),
    nn.ParameterList: Layer("nnx.List", takes_rngs=False),
    nn.Parameter: Layer("nnx.Param", {"data": "value"}, takes_rngs=False),
}  # fmt: skip

# Layers without arrays -> functions, and the keywords that their arguments are.
ACTIVATIONS: dict[type, tuple[str, Mapping[str, str], Mapping[str, str]]] = {
    nn.ReLU: ("nnx.relu", _NONE, _NONE),
    nn.ReLU6: ("nnx.relu6", _NONE, _NONE),
    nn.SiLU: ("nnx.silu", _NONE, _NONE),
    nn.Mish: ("jax.nn.mish", _NONE, _NONE),
    nn.Sigmoid: ("nnx.sigmoid", _NONE, _NONE),
    nn.Tanh: ("jnp.tanh", _NONE, _NONE),
    nn.Softplus: ("nnx.softplus", _NONE, _NONE),
    nn.Hardswish: ("nnx.hard_swish", _NONE, _NONE),
    nn.Hardsigmoid: ("nnx.hard_sigmoid", _NONE, _NONE),
    nn.ELU: ("nnx.elu", {"alpha": "alpha"}, _NONE),
    nn.LeakyReLU: ("nnx.leaky_relu", {"negative_slope": "negative_slope"}, _NONE),
    nn.GELU: ("nnx.gelu", {"approximate": "approximate"}, {"approximate": "False"}),
    nn.Softmax: ("nnx.softmax", {"dim": "axis"}, _NONE),
    nn.Identity: ("lambda x: x", _NONE, _NONE),
}
WORDS = {"approximate": {"none": False, "tanh": True}}  # of PyTorch -> what they are here
FUNCTIONS: Mapping[Any, str] = {
    torch.relu: "nnx.relu", nn.functional.relu: "nnx.relu", nn.functional.silu: "nnx.silu",
    nn.functional.interpolate: "interpolate", nn.utils.weight_norm: "add_weight_norm",
    nn.utils.parametrizations.weight_norm: "add_parametrized_weight_norm",
    torch.tanh: "jnp.tanh", torch.sigmoid: "nnx.sigmoid", nn.functional.softplus: "nnx.softplus",
}  # fmt: skip
IGNORED = frozenset({"inplace", "device", "dtype", "track_running_stats", "requires_grad"})


def layer_of(cls: Any) -> Layer | None:
    """Returns what stands for a class; None for a class of the model's own."""
    if isinstance(cls, type) and cls.__module__ == "einops.layers.torch":
        return Layer(cls.__name__, takes_rngs=False) if hasattr(flax_layers, cls.__name__) else None
    return LAYERS.get(cls) if isinstance(cls, type) else None


def base_of(cls: type) -> Layer | None:
    """Returns what stands for the first of a class and its bases for which something does."""
    return next((LAYERS[base] for base in cls.__mro__ if base in LAYERS), None)


def classes_of(cls: type) -> list[type]:
    """Returns a class and its bases without those that are PyTorch's and have a counterpart."""
    is_counterpart = base_of(cls) is not None or cls in ACTIVATIONS
    return [
        base for base in cls.__mro__
        if not is_library_module(base) or not (is_counterpart or base is nn.Module)
    ]  # fmt: skip


def says_bias(module: Any) -> bool:
    """Returns whether a module is a layer whose counterpart says whether it has a bias."""
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d
    return isinstance(module, kinds)


def is_forward(method: Any) -> bool:
    """Returns whether something is the `forward` of a layer's class, bound or not."""
    function = getattr(method, "__func__", method)
    return function is not None and any(function is getattr(cls, "forward", None) for cls in LAYERS)


def is_library_module(cls: Any) -> bool:
    """Returns whether a class is a module of PyTorch itself."""
    is_module = isinstance(cls, type) and issubclass(cls, nn.Module)
    return is_module and cls.__module__.partition(".")[0] == "torch"


def signature_of(cls: type) -> inspect.Signature:
    """Returns the parameters of a class of PyTorch."""
    return inspect.signature(cls.__init__ if cls is not nn.Parameter else cls.__new__)  # type: ignore[misc]
