"""The table of layers: Flax's classes, and what a file for PyTorch has in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.nn import initializers

from fmapper_translate.torch import layers, norms, recurrent, weights

FILES = layers, norms, recurrent, weights  # whose source files take


@dataclass(frozen=True)
class Layer:
    """The counterpart of a class of Flax.

    Attributes:
        name: The class, as the file names it; it takes Flax's arguments.
        attributes: Flax's attributes -> those of this one.
        kernel: For a convolution, where Flax has the first two dimensions of its weight.
    """

    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    kernel: tuple[int, int] | None = None

    def read(self, name: str) -> str:
        """Returns the template of the code that reads an array of Flax's, in Flax's layout."""
        if self.kernel is not None and name == "kernel":
            return f"{{0}}.weight.movedim((0, 1), {self.kernel})"
        title = self.name.removeprefix("Lazy")
        kind = next((vars(file)[title] for file in FILES if title in vars(file)), None)
        known = getattr(kind, "source_arrays", {})
        places = {theirs: (ours, axes) for ours, (theirs, axes) in known.items()}
        ours, axes = places.get(name, (name, None))
        return f"{{0}}.{ours}.T" if axes == (1, 0) else f"{{0}}.{ours}"


LAYERS: dict[type, Layer] = {
    nnx.Linear: Layer("Linear"),
    nnx.LinearGeneral: Layer("LinearGeneral"),
    nnx.Einsum: Layer("Einsum"),
    nnx.Embed: Layer("Embed"),
    nnx.Conv: Layer("Conv", kernel=(-1, -2)),
    nnx.ConvTranspose: Layer("ConvTranspose", kernel=(-2, -1)),
    nnx.LayerNorm: Layer("LayerNorm", {"epsilon": "eps"}),
    nnx.RMSNorm: Layer("RMSNorm", {"epsilon": "eps"}),
    nnx.GroupNorm: Layer("GroupNorm"),
    nnx.BatchNorm: Layer("BatchNorm"),
    nnx.InstanceNorm: Layer("InstanceNorm"),
    nnx.PReLU: Layer("PReLU"),
    nnx.LoRA: Layer("LoRA"),
    nnx.LoRALinear: Layer("LoRALinear"),
    nnx.Dropout: Layer("Dropout", {"rate": "p"}),
    nnx.MultiHeadAttention: Layer("MultiHeadAttention"),
    nnx.LSTMCell: Layer("LSTMCell"),
    nnx.OptimizedLSTMCell: Layer("OptimizedLSTMCell"),
    nnx.GRUCell: Layer("GRUCell"),
    nnx.SimpleCell: Layer("SimpleCell"),
    nnx.RNN: Layer("RNN"),
    nnx.Bidirectional: Layer("Bidirectional"),
    nnx.Sequential: Layer("Sequential"),
    nnx.List: Layer("nn.ModuleList"),
    nnx.Dict: Layer("nn.ModuleDict"),
    linen.Dense: Layer("LazyLinear"),
    linen.DenseGeneral: Layer("LazyLinearGeneral"),
    linen.Embed: Layer("Embed"),
    linen.Conv: Layer("LazyConv", kernel=(-1, -2)),
    linen.ConvTranspose: Layer("LazyConvTranspose", kernel=(-2, -1)),
    linen.LayerNorm: Layer("LazyLayerNorm"),
    linen.RMSNorm: Layer("LazyRMSNorm"),
    linen.GroupNorm: Layer("LazyGroupNorm"),
    linen.BatchNorm: Layer("LazyBatchNorm"),
    linen.InstanceNorm: Layer("LazyInstanceNorm"),
    linen.PReLU: Layer("PReLU"),
    linen.Dropout: Layer("Dropout"),
    linen.MultiHeadDotProductAttention: Layer("LazyMultiHeadAttention"),
    linen.MultiHeadAttention: Layer("LazyMultiHeadAttention"),
    linen.SelfAttention: Layer("LazyMultiHeadAttention"),
    linen.Sequential: Layer("Layers"),
    linen.LSTMCell: Layer("LSTMCell"),
    linen.OptimizedLSTMCell: Layer("LSTMCell"),
    linen.GRUCell: Layer("GRUCell"),
    linen.RNN: Layer("RNN"),
    linen.Bidirectional: Layer("Bidirectional"),
}
MODES = frozenset({"deterministic", "use_running_average"})  # attributes that `eval()` sets
# Arguments of layers that say how they compute; the file computes in the precision of its arrays.
SETTINGS = frozenset({
    "dtype", "param_dtype", "precision", "dot_general", "dot_general_cls", "conv_general_dilated",
    "promote_dtype", "axis_name", "axis_index_groups", "preferred_element_type",
    "use_fast_variance",    "force_fp32_for_softmax", "keep_rngs", "rng_collection",
})  # fmt: skip
_DEFAULTS = (None, jnp.float32, "float32", "default", True, False, "dropout")

# Functions that return initializers -> the file's; and initializers -> the code for the file's.
_SAME = (
    "variance_scaling", "lecun_normal", "lecun_uniform", "he_normal", "he_uniform",
    "xavier_normal", "xavier_uniform", "zeros_init", "ones_init",
)  # fmt: skip
INITIALIZERS: dict[Any, str] = {
    **{getattr(initializers, name, getattr(nnx.initializers, name, None)): name for name in _SAME},
    nnx.initializers.zeros_init: "zeros_init",
    nnx.initializers.ones_init: "ones_init",
    linen.initializers.zeros_init: "zeros_init",
    linen.initializers.ones_init: "ones_init",
    initializers.normal: "normal_init",
    initializers.truncated_normal: "trunc_normal_init",
    initializers.uniform: "uniform_init",
    initializers.constant: "constant_init",
    initializers.orthogonal: "orthogonal_init",
}
DRAWN: dict[Any, str] = {
    initializers.zeros: "zeros_init()", initializers.ones: "ones_init()",
    linen.linear.default_kernel_init: "lecun_normal()",
    linen.linear.default_embed_init: 'variance_scaling(1.0, "fan_in", "normal", -1, 0)',
}  # fmt: skip


def layer_of(cls: Any) -> Layer | None:
    """Returns what stands for a class; None for a class of the model's own."""
    cls = plain_class(cls)
    return LAYERS.get(cls) if isinstance(cls, type) else None


def plain_class(cls: Any) -> Any:
    """Returns a class; of one that `nn.remat` has made, what it was made of."""
    is_made = isinstance(cls, type) and cls.__module__ == "flax.linen.transforms"
    return cls.__base__ if is_made and cls.__name__.startswith("Checkpoint") else cls


def base_of(cls: type) -> Layer | None:
    """Returns what stands for the first of a class and its bases for which something does."""
    return next((LAYERS[base] for base in cls.__mro__ if base in LAYERS), None)


def is_setting(name: str | None, values: list[Any]) -> bool:
    """Returns whether an argument of a layer says only that it computes as a file does."""
    return name in SETTINGS and all(value in _DEFAULTS for value in values)


def is_library_module(cls: Any) -> bool:
    """Returns whether a class is a module of Flax itself."""
    cls = plain_class(cls)
    is_own = isinstance(cls, type) and cls.__module__.partition(".")[0] in ("flax", "equinox")
    return is_own and any(base.__name__ == "Module" for base in cls.__mro__)


def is_module(value: Any) -> bool:
    """Returns whether something is a module of a framework, or consists of such."""
    if isinstance(value, list | tuple | dict):
        return any(map(is_module, value.values() if isinstance(value, dict) else value))
    if isinstance(value, nnx.Module | linen.Module):
        return True
    return any(base.__module__.startswith("equinox.") for base in type(value).__mro__)


def is_initializer(function: Any) -> bool:
    """Returns whether something is an initializer of JAX's: a function of a key and a shape."""
    module = getattr(function, "__module__", "") or ""
    return function in DRAWN or (
        module == "jax._src.nn.initializers" and getattr(function, "__name__", "") == "init"
    )


def is_random(value: Any) -> bool:
    """Returns whether something is for random numbers, which PyTorch keeps itself."""
    if isinstance(value, nnx.Rngs | nnx.RngStream | nnx.RngState):
        return True
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
