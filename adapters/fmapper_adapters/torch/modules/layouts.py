"""Where the weights of torch's layers, and of those of transformers, have their outputs."""

from __future__ import annotations

_OUTPUTS_FIRST = (
    "Linear Bilinear Conv1d Conv2d Conv3d LSTM GRU RNN RNNBase LSTMCell GRUCell RNNCell "
    "RNNCellBase MultiheadAttention"
)
WEIGHT_LAYOUTS = {
    **dict.fromkeys(_OUTPUTS_FIRST.split(), "outputs first"),
    "Conv1D": "outputs last",  # of transformers
    "Embedding": "rows",
    "EmbeddingBag": "rows",
}
