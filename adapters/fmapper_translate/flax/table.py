"""The counterparts of PyTorch's layers and functions in files for Flax NNX."""

from __future__ import annotations

from typing import Any

from torch import nn

from fmapper_translate.flax import encoders, layers, recurrent
from fmapper_translate.targets.layers import Layer, Layers, activations, functions

_OF_CONVOLUTIONS = {
    "groups": "feature_group_count", "stride": "strides", "dilation": "kernel_dilation",
    "padding": "pads",
}  # fmt: skip
_ROWS: dict[type, Layer] = {
    nn.Linear: Layer("Linear"),
    nn.Embedding: Layer("Embedding"),
    nn.EmbeddingBag: Layer("EmbeddingBag"),
    nn.LayerNorm: Layer("LayerNorm", attributes={"eps": "epsilon"}, draws=False),
    nn.Dropout: Layer(
        "nnx.Dropout", {"p": "rate"}, {"rate": "0.5"}, attributes={"p": "rate"}
    ),
    **{
        kind: Layer("nnx.Dropout", {"p": "rate"}, {"rate": "0.5", "broadcast_dims": dims},
                    attributes={"p": "rate"})
        for kind, dims in (
            (nn.Dropout1d, "(-1,)"), (nn.Dropout3d, "(-3, -2, -1)"),
        )
    },
    nn.Dropout2d: Layer("Dropout2d", {"p": "rate"}, {"rate": "0.5"}, attributes={"p": "rate"}),
    nn.Conv1d: Layer("Conv1d", attributes=_OF_CONVOLUTIONS),
    nn.Conv2d: Layer("Conv2d", attributes=_OF_CONVOLUTIONS),
    nn.Conv3d: Layer("Conv3d", attributes=_OF_CONVOLUTIONS),
    nn.ConvTranspose1d: Layer("ConvTranspose1d", attributes=_OF_CONVOLUTIONS),
    nn.ConvTranspose2d: Layer("ConvTranspose2d", attributes=_OF_CONVOLUTIONS),
    nn.ConvTranspose3d: Layer("ConvTranspose3d", attributes=_OF_CONVOLUTIONS),
    nn.BatchNorm1d: Layer("BatchNorm1d", draws=False),
    nn.BatchNorm2d: Layer("BatchNorm2d", draws=False),
    nn.BatchNorm3d: Layer("BatchNorm3d", draws=False),
    nn.LSTM: Layer("LSTM", attributes={"_all_weights": "arrays_of_layers"}),
    nn.GRU: Layer("GRU", attributes={"_all_weights": "arrays_of_layers"}),
    nn.RNN: Layer("RNN", attributes={"_all_weights": "arrays_of_layers"}),
    nn.LSTMCell: Layer("LSTMCell"),
    nn.GRUCell: Layer("GRUCell"),
    nn.GroupNorm: Layer("GroupNorm", draws=False),
    nn.InstanceNorm1d: Layer("InstanceNorm2d", draws=False),
    nn.InstanceNorm2d: Layer("InstanceNorm2d", draws=False),
    nn.InstanceNorm3d: Layer("InstanceNorm2d", draws=False),
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
    nn.TransformerEncoderLayer: Layer("TransformerEncoderLayer"),
    nn.TransformerDecoderLayer: Layer("TransformerDecoderLayer"),
    nn.TransformerEncoder: Layer("TransformerEncoder"),
    nn.TransformerDecoder: Layer("TransformerDecoder"),
    nn.Transformer: Layer("Transformer"),
    nn.Flatten: Layer("Flatten", takes_rngs=False),
    nn.Sequential: Layer("Sequential", takes_rngs=False),
    nn.ModuleList: Layer("nnx.List", takes_rngs=False),
    nn.ModuleDict: Layer("ModuleDict", takes_rngs=False),
    nn.ParameterList: Layer("nnx.List", takes_rngs=False),
    nn.ParameterDict: Layer("ModuleDict", takes_rngs=False),
    nn.Parameter: Layer("nnx.Param", {"data": "value"}, takes_rngs=False),
}  # fmt: skip

_FUNCTIONS: dict[Any, str] = {
    nn.utils.weight_norm: "add_weight_norm",
    nn.utils.parametrizations.weight_norm: "add_parametrized_weight_norm",
    nn.utils.spectral_norm: "add_spectral_norm",
}
LAYERS = Layers(
    _ROWS, activations("nnx"), {**functions("nnx"), **_FUNCTIONS}, (recurrent, encoders, layers)
)
