"""The counterparts of PyTorch's layers and functions in files for Equinox."""

from __future__ import annotations

from torch import nn

from fmapper_translate.equinox import layers, recurrent
from fmapper_translate.targets.layers import NONE, Activation, Layer, Layers, activations, functions

_ROWS: dict[type, Layer] = {
    nn.Linear: Layer("Linear"),
    nn.Embedding: Layer("Embedding", attributes={"embedding_dim": "embedding_size"}),
    nn.LayerNorm: Layer(
        "LayerNorm", attributes={"normalized_shape": "shape", "elementwise_affine": "use_weight"},
        takes_rngs=False,
    ),
    nn.Dropout: Layer("eqx.nn.Dropout", takes_rngs=False),
    nn.MultiheadAttention: Layer("MultiheadAttention", keywords={"key": "key_"}),
    nn.ModuleList: Layer("list", takes_rngs=False),
    nn.ParameterList: Layer("list", takes_rngs=False),
    nn.Parameter: Layer("jnp.asarray", takes_rngs=False),
    nn.ZeroPad2d: Layer("ConstantPad2d", takes_rngs=False),
    **{
        cls: Layer(cls.__name__)
        for cls in (
            nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
            nn.ConvTranspose3d, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell,
        )
    },
    **{
        cls: Layer(cls.__name__, takes_rngs=False)
        for cls in (
            nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.MaxPool1d,
            nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
            nn.ConstantPad1d, nn.ConstantPad2d, nn.Unfold, nn.Flatten, nn.Sequential,
            nn.ModuleDict,
        )
    },
}  # fmt: skip
_IDENTITY: Activation = ("eqx.nn.Identity()", NONE, NONE)
_ACTIVATIONS = {**activations("jax.nn"), nn.Identity: _IDENTITY}
_FUNCTIONS = {
    **functions("jax.nn"),
    nn.utils.weight_norm: "add_weight_norm",
    nn.utils.parametrizations.weight_norm: "add_parametrized_weight_norm",
    nn.utils.spectral_norm: "add_spectral_norm",
}
LAYERS = Layers(_ROWS, _ACTIVATIONS, _FUNCTIONS, (recurrent, layers))
