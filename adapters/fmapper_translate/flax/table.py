"""The counterparts of PyTorch's layers and functions in files for Flax NNX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fmapper_translate.flax import layers, recurrent
from fmapper_translate.targets.layers import NONE as _NONE
from fmapper_translate.targets.layers import Activation, Layer, Layers

_OF_CONVOLUTIONS = {
    "groups": "feature_group_count", "stride": "strides", "dilation": "kernel_dilation",
    "padding": "pads",
}  # fmt: skip
_ROWS: dict[type, Layer] = {
    nn.Linear: Layer("Linear"),
    nn.Embedding: Layer("Embedding"),
    nn.EmbeddingBag: Layer("EmbeddingBag"),
    nn.LayerNorm: Layer("LayerNorm", attributes={"eps": "epsilon"}),
    nn.Dropout: Layer(
        "nnx.Dropout", {"p": "rate"}, {"rate": "0.5"}, attributes={"p": "rate"}
    ),
    **{
        kind: Layer("nnx.Dropout", {"p": "rate"}, {"rate": "0.5", "broadcast_dims": dims},
                    attributes={"p": "rate"})
        for kind, dims in (
            (nn.Dropout1d, "(-1,)"), (nn.Dropout2d, "(-2, -1)"), (nn.Dropout3d, "(-3, -2, -1)"),
        )
    },
    nn.Conv1d: Layer("Conv1d", attributes=_OF_CONVOLUTIONS),
    nn.Conv2d: Layer("Conv2d", attributes=_OF_CONVOLUTIONS),
    nn.Conv3d: Layer("Conv3d", attributes=_OF_CONVOLUTIONS),
    nn.ConvTranspose1d: Layer("ConvTranspose1d"),
    nn.ConvTranspose2d: Layer("ConvTranspose2d"),
    nn.ConvTranspose3d: Layer("ConvTranspose3d"),
    nn.BatchNorm1d: Layer("BatchNorm1d"),
    nn.BatchNorm2d: Layer("BatchNorm2d"),
    nn.BatchNorm3d: Layer("BatchNorm3d"),
    nn.LSTM: Layer("LSTM"),
    nn.GRU: Layer("GRU"),
    nn.LSTMCell: Layer("LSTMCell"),
    nn.GRUCell: Layer("GRUCell"),
    nn.GroupNorm: Layer("GroupNorm"),
    nn.InstanceNorm1d: Layer("InstanceNorm2d"),
    nn.InstanceNorm2d: Layer("InstanceNorm2d"),
    nn.InstanceNorm3d: Layer("InstanceNorm2d"),
    nn.MaxPool1d: Layer("MaxPool1d", takes_rngs=False),
    nn.MaxPool2d: Layer("MaxPool2d", takes_rngs=False),
    nn.AvgPool1d: Layer("AvgPool1d", takes_rngs=False),
    nn.AvgPool2d: Layer("AvgPool2d", takes_rngs=False),
    nn.AdaptiveAvgPool1d: Layer("AdaptiveAvgPool1d", takes_rngs=False),
    nn.AdaptiveAvgPool2d: Layer("AdaptiveAvgPool2d", takes_rngs=False),
    nn.ConstantPad1d: Layer("ConstantPad1d", takes_rngs=False),
    nn.ConstantPad2d: Layer("ConstantPad2d", takes_rngs=False),
    nn.ConstantPad3d: Layer("ConstantPad3d", takes_rngs=False),
    nn.ZeroPad1d: Layer("ConstantPad1d", takes_rngs=False),
    nn.ZeroPad2d: Layer("ConstantPad2d", takes_rngs=False),
    nn.ZeroPad3d: Layer("ConstantPad3d", takes_rngs=False),
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
_ACTIVATIONS: dict[type, Activation] = {
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
_FUNCTIONS: Mapping[Any, str] = {
    torch.relu: "nnx.relu", nn.functional.relu: "nnx.relu", nn.functional.silu: "nnx.silu",
    nn.functional.interpolate: "interpolate", nn.utils.weight_norm: "add_weight_norm",
    nn.utils.parametrizations.weight_norm: "add_parametrized_weight_norm",
    torch.tanh: "jnp.tanh", torch.sigmoid: "nnx.sigmoid", nn.functional.softplus: "nnx.softplus",
    nn.functional.tanh: "jnp.tanh", nn.functional.sigmoid: "nnx.sigmoid",
    nn.functional.gelu: "partial(nnx.gelu, approximate=False)", nn.functional.relu6: "nnx.relu6",
    nn.functional.elu: "nnx.elu", nn.functional.selu: "nnx.selu", torch.selu: "nnx.selu",
    nn.functional.leaky_relu: "nnx.leaky_relu", nn.functional.mish: "jax.nn.mish",
    nn.functional.hardswish: "nnx.hard_swish", nn.functional.hardsigmoid: "nnx.hard_sigmoid",
    nn.functional.logsigmoid: "nnx.log_sigmoid", torch.sin: "jnp.sin", torch.cos: "jnp.cos",
    torch.exp: "jnp.exp", torch.abs: "jnp.abs", torch.square: "jnp.square",
}  # fmt: skip
LAYERS = Layers(_ROWS, _ACTIVATIONS, _FUNCTIONS, (recurrent, layers))
