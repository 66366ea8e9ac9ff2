"""Tables of layers: PyTorch's classes, and what a file has in their place."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

Order = tuple[int, ...] | None
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Layer:
    """The counterpart of a class of PyTorch.

    Attributes:
        name: The class, as the file names it.
        names: Parameters of PyTorch's constructor -> those of this one; None for the same ones.
        defaults: Keywords of this one -> their code where PyTorch's are not given.
        attributes: PyTorch's attributes -> those of this one.
        by_place: How many arguments are given by position, where `names` says which.
        takes_rngs: Whether its constructor takes random numbers.
        draws: Whether its first values are drawn from these.
        is_one_number: Parameters that are one number, where PyTorch may be given a tuple of one.
        arrays: Its variables -> PyTorch's names, and the order of the dimensions, where they
            differ.
        keywords: Keywords of calls -> those of this one.
        inside: Its attribute that holds what PyTorch's layer has itself.
    """

    name: str
    names: Mapping[str, str] | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    by_place: int = 1
    takes_rngs: bool = True
    draws: bool = True
    is_one_number: frozenset[str] = frozenset()
    arrays: Mapping[str, tuple[str, Order]] = field(default_factory=dict)
    keywords: Mapping[str, str] = field(default_factory=dict)
    inside: str = ""

    def variable(self, name: str) -> tuple[str, Order]:
        """Returns its variable for an array of PyTorch's layer, and the order of its dimensions."""
        names = {theirs: (key, order) for key, (theirs, order) in self.arrays.items()}
        return names.get(name, (name, None))

    def first(self, count: int) -> tuple[str, ...]:
        """Returns the names of the first parameters."""
        return tuple((self.names or {}).values())[:count]


# A function, PyTorch's arguments -> its keywords, and keywords that are always there -> their code.
Activation = tuple[str, Mapping[str, str], Mapping[str, str]]


def activations(module: str) -> dict[type, Activation]:
    """Returns the activations as a module has them: `nnx`, `jax.nn`."""
    return {
        nn.ReLU: (f"{module}.relu", NONE, NONE),
        nn.ReLU6: (f"{module}.relu6", NONE, NONE),
        nn.SiLU: (f"{module}.silu", NONE, NONE),
        nn.Mish: ("jax.nn.mish", NONE, NONE),
        nn.Sigmoid: (f"{module}.sigmoid", NONE, NONE),
        nn.Tanh: ("jnp.tanh", NONE, NONE),
        nn.Softplus: (f"{module}.softplus", {"beta": "beta", "threshold": "threshold"}, NONE),
        nn.Hardswish: (f"{module}.hard_swish", NONE, NONE),
        nn.Hardsigmoid: (f"{module}.hard_sigmoid", NONE, NONE),
        nn.ELU: (f"{module}.elu", {"alpha": "alpha"}, NONE),
        nn.LeakyReLU: (f"{module}.leaky_relu", {"negative_slope": "negative_slope"}, NONE),
        nn.GELU: (f"{module}.gelu", {"approximate": "approximate"}, {"approximate": "False"}),
        nn.Softmax: (f"{module}.softmax", {"dim": "axis"}, NONE),
        nn.Identity: ("lambda x: x", NONE, NONE),
    }


def functions(module: str) -> dict[Any, str]:
    """Returns functions of PyTorch -> those of files, with activations of a module."""
    names = {
        "relu": "relu", "relu6": "relu6", "silu": "silu", "softplus": "softplus", "elu": "elu",
        "selu": "selu", "leaky_relu": "leaky_relu", "sigmoid": "sigmoid",
        "hardswish": "hard_swish", "hardsigmoid": "hard_sigmoid", "logsigmoid": "log_sigmoid",
        "softmax": "softmax", "log_softmax": "log_softmax",
    }  # fmt: skip
    named = {getattr(nn.functional, name): f"{module}.{ours}" for name, ours in names.items()}
    return named | {
        torch.relu: f"{module}.relu", torch.sigmoid: f"{module}.sigmoid",
        torch.selu: f"{module}.selu", nn.functional.mish: "jax.nn.mish",
        nn.functional.gelu: f"partial({module}.gelu, approximate=False)",
        nn.functional.tanh: "jnp.tanh", torch.tanh: "jnp.tanh", torch.sin: "jnp.sin",
        torch.cat: "jnp.concatenate", torch.stack: "jnp.stack",
        torch.cos: "jnp.cos", torch.exp: "jnp.exp", torch.abs: "jnp.abs",
        torch.square: "jnp.square", nn.functional.interpolate: "interpolate",
        nn.Transformer.generate_square_subsequent_mask: "square_subsequent_mask",
        nn.functional.kl_div: "kl_div", nn.functional.gaussian_nll_loss: "gaussian_nll_loss",
        nn.functional.local_response_norm: "local_response_norm",
        nn.functional.instance_norm: "instance_norm",
        nn.functional.cross_entropy: "cross_entropy",
        checkpoint_sequential: "call_in_order",
    }  # fmt: skip


class Layers:
    """The table of layers of a target.

    Args:
        rows: Classes of PyTorch -> their counterparts.
        activations: Classes without arrays -> functions.
        functions: Functions of PyTorch -> those of files.
        modules: The modules that files take layers from; `source_arrays` of a class says how
            PyTorch calls its arrays, where that differs.

    Attributes:
        tied: A linear layer with the matrix of an embedding, if files may have one.
    """

    def __init__(
        self,
        rows: Mapping[type, Layer],
        activations: Mapping[type, Activation],
        functions: Mapping[Any, str],
        modules: Sequence[types.ModuleType],
    ) -> None:
        self._space = {name: value for module in modules for name, value in vars(module).items()}
        self.rows = {cls: self._complete(row) for cls, row in rows.items()}
        tied = "TiedLinear"
        self.tied = self._complete(Layer(tied)) if tied in self._space else None
        self.activations = activations
        self.functions = functions

    def _complete(self, row: Layer) -> Layer:
        known = self._space.get(row.name)
        names, inside = getattr(known, "source_arrays", NONE), getattr(known, "inside", "")
        return replace(row, arrays=names, inside=inside)

    def layer_of(self, cls: Any) -> Layer | None:
        """Returns what stands for a class; None for a class of the model's own."""
        if isinstance(cls, type) and cls.__module__ == "einops.layers.torch":
            return Layer(cls.__name__, takes_rngs=False) if cls.__name__ in self._space else None
        return self.rows.get(cls) if isinstance(cls, type) else None

    def base_of(self, cls: type) -> Layer | None:
        """Returns what stands for the first of a class and its bases for which something does."""
        return next((self.rows[base] for base in cls.__mro__ if base in self.rows), None)

    def classes_of(self, cls: type) -> list[type]:
        """Returns a class and its bases without those that are PyTorch's and have a counterpart."""
        is_counterpart = self.base_of(cls) is not None or cls in self.activations
        return [
            base for base in cls.__mro__
            if not is_library_module(base) or not (is_counterpart or base is nn.Module)
        ]  # fmt: skip

    def is_forward(self, method: Any) -> bool:
        """Returns whether something is the `forward` of a layer's class, bound or not."""
        function = getattr(method, "__func__", method)
        return function is not None and any(
            function is getattr(cls, "forward", None) for cls in self.rows
        )


# Activations that are another function where they are given arguments.
WITH_ARGUMENTS: dict[type, str] = {nn.Softplus: "softplus"}
WORDS = {"approximate": {"none": False, "tanh": True}}  # of PyTorch -> what they are here
IGNORED = frozenset(
    {"inplace", "device", "dtype", "track_running_stats", "requires_grad", "sparse"}
)


def says_bias(module: Any) -> bool:
    """Returns whether a module is a layer whose counterpart says whether it has a bias."""
    convolutions = nn.Conv1d | nn.Conv2d | nn.Conv3d
    turned = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
    return isinstance(module, nn.Linear | convolutions | turned)


def gap_of(module: nn.Module) -> str:
    """Returns what a layer does that no counterpart does; empty for nothing."""
    kind = type(module).__name__
    batch = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    if isinstance(module, batch) and not module.track_running_stats:
        return f"{kind} without running statistics"
    instance = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
    if isinstance(module, instance) and module.track_running_stats:
        return f"{kind} with running statistics"
    is_pool = isinstance(module, nn.AvgPool1d | nn.AvgPool2d) and module.ceil_mode
    if is_pool and module.count_include_pad and any((*_tuple(module.padding), 0)):
        return f"{kind} that rounds up and counts its padding"
    return ""


def unused_counters(model: nn.Module, *, counts: bool) -> set[str]:
    """Returns the names of counters of batches that layers of a file do not have.

    Args:
        model: The model.
        counts: Whether those do that need one, since their statistics are plain means.
    """
    return {
        f"{path}.num_batches_tracked".removeprefix(".")
        for path, part in model.named_modules(remove_duplicate=False)
        if "num_batches_tracked" in part._buffers and not (counts and part.momentum is None)
    }


def second_names(model: nn.Module, *, counts: bool) -> set[str]:
    """Returns the names in a state dict of arrays that have an earlier one; see above."""
    arrays: Mapping[str, Any] = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, array in arrays.items():
        first.setdefault(id(array), name)
    return arrays.keys() - first.values() - unused_counters(model, counts=counts)


def _tuple(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def is_library_module(cls: Any) -> bool:
    """Returns whether a class is a module of PyTorch itself."""
    is_module = isinstance(cls, type) and issubclass(cls, nn.Module)
    return is_module and cls.__module__.partition(".")[0] == "torch"


def signature_of(cls: type) -> inspect.Signature:
    """Returns the parameters of a class of PyTorch."""
    return inspect.signature(cls.__init__ if cls is not nn.Parameter else cls.__new__)  # type: ignore[misc]
