"""Packed sequences, which are recorded as padded ones with their lengths.

The length of the data of a `PackedSequence` depends on values. Recurrent networks and
`pad_packed_sequence` need only the lengths and padded data; other reads of the data are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import rnn

from fmapper_adapters.torch import _private

_NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# Functions that treat all rows of the data alike, and those that do not read sizes.
_ROW_BY_ROW = frozenset(
    ("dropout", "linear", "relu", "tanh", "sigmoid", "gelu", "silu", "layer_norm", "to", "cpu")
)
_HARMLESS = frozenset(("dim", "size", "__get__"))


class Refused(Exception):
    """Raised for a function that would be recorded incorrectly, with the reason and a way out."""


class _Longest(int):
    """The number of steps of the longest sequence, if no total length was passed."""


@torch.library.custom_op("fmapper::packed_network", mutates_args=())
def packed_network(
    name: str,
    data: torch.Tensor,
    lengths: torch.Tensor,
    states: list[torch.Tensor],
    weights: list[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> list[torch.Tensor]:
    """Runs a recurrent network over sequences of given lengths; data (steps * batch, features)."""
    batch = lengths.shape[0]
    steps = data.shape[0] // batch
    packed = rnn.pack_padded_sequence(data.reshape(steps, batch, -1), lengths.cpu())
    start = tuple(states) if name == "lstm" else states[0]
    options = (weights, has_biases, layers, dropout, train, bidirectional)
    outputs, *ends = _private.get_recurrent(name)(packed.data, packed.batch_sizes, start, *options)
    again = rnn.PackedSequence(outputs, packed.batch_sizes)
    padded, _ = rnn.pad_packed_sequence(again, total_length=steps)
    return [padded.reshape(steps * batch, -1), *ends]


@packed_network.register_fake
def _(
    name: str,
    data: torch.Tensor,
    lengths: torch.Tensor,
    states: list[torch.Tensor],
    weights: list[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> list[torch.Tensor]:
    features = states[0].shape[-1] * (2 if bidirectional else 1)
    return [data.new_empty(data.shape[0], features), *map(torch.empty_like, states)]


def lengths_in(args: Any, kwargs: Any) -> Any:
    """Returns the lengths of the packed sequence among the arguments, if any."""
    for arg in (*args, *kwargs.values()):
        for item in arg if isinstance(arg, tuple | list) else (arg,):
            if isinstance(item, torch.Tensor):
                lengths = getattr(item, "packed_lengths", None)
                if lengths is not None:
                    return lengths
    return None


def pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """Replaces the operation behind `pack_padded_sequence`."""
    x = x.transpose(0, 1) if batch_first else x
    data: Any = x.flatten(0, 1)
    sizes: Any = torch.zeros(x.shape[0], dtype=torch.int64)
    data.packed_lengths = sizes.packed_lengths = lengths
    return data, sizes


def call_packed(func: Any, args: Any, kwargs: Any, lengths: Any) -> Any:
    """Calls a function with a packed sequence among its arguments.

    Raises:
        Refused: The function needs the data in torch's packed layout.
    """
    name = getattr(func, "__name__", "")
    if name in _NETWORKS:
        return _network(name, lengths, *args)
    if name == "_pad_packed_sequence":
        return _unpack(lengths, *args)
    if name == "__getitem__" and args[1] == 0 and args[0].ndim == 1:
        return lengths.shape[0]  # the batch size of the first step
    if name == "size" and args[0].ndim == 1:
        steps = func(*args, **kwargs)
        return _Longest(steps) if type(steps) is int else steps
    if name in _HARMLESS:
        return func(*args, **kwargs)
    if name in _ROW_BY_ROW:
        result = func(*args, **kwargs)
        result.packed_lengths = lengths
        return result
    raise Refused(
        f"{name} reads the data of a PackedSequence, whose size depends on values. Call "
        f"pad_packed_sequence on it first."
    )


def _network(
    name: str, lengths: Any, data: Any, sizes: Any, states: Any, weights: Any, *options: Any
) -> Any:
    start = list(states) if isinstance(states, tuple | list) else [states]
    outputs: Any = packed_network(name, data, lengths, start, list(weights), *options)
    outputs[0].packed_lengths = lengths
    return tuple(outputs)


def _unpack(
    lengths: Any, data: Any, sizes: Any, batch_first: bool, value: float, total: Any
) -> Any:
    steps = sizes.shape[0]
    if type(total) is not int:
        fills = lengths.max() == steps
        _private.assert_async(
            fills, "no sequence is as long as the padding: pass total_length to pad_packed_sequence"
        )
    x = data.unflatten(0, (steps, lengths.shape[0]))
    inside = torch.arange(steps)[:, None] < lengths
    x = torch.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), x, value)
    if total > steps:
        x = torch.cat([x, x.new_full((total - steps, *x.shape[1:]), value)])
    return (x.transpose(0, 1) if batch_first else x), lengths.clone()
