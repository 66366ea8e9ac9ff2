"""Recurrent networks over sequences of varying length.

torch traces them step by step to find the shapes of their results, which fixes the length. Custom
operations declare their shapes, so that a recording holds for every length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmapper_adapters.torch import _private

_OPTIONS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first"
)


def _define(name: str, states: str, results: str) -> Any:
    def run(x: Any, hx: Any, *options: Any) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = tuple(_private.get_recurrent(name)(x, hx, *options))
        return outputs

    def shapes(x: Any, hx: Any, *options: Any) -> tuple[Any, ...]:
        starts = hx if isinstance(hx, list | tuple) else [hx]
        bidirectional = options[5]
        features = starts[0].shape[-1] * (2 if bidirectional else 1)
        return x.new_empty(*x.shape[:-1], features), *map(torch.empty_like, starts)

    schema = f"(Tensor input, {states} hx, {_OPTIONS}) -> ({results})"
    operation = torch.library.custom_op(f"fmapper::{name}", run, mutates_args=(), schema=schema)
    operation.register_fake(shapes)
    return operation


_OPERATIONS = {
    "lstm": _define("lstm", "Tensor[]", "Tensor, Tensor, Tensor"),
    "gru": _define("gru", "Tensor", "Tensor, Tensor"),
    "rnn_tanh": _define("rnn_tanh", "Tensor", "Tensor, Tensor"),
    "rnn_relu": _define("rnn_relu", "Tensor", "Tensor, Tensor"),
}
# Recorded operation -> the operation of torch that it stands for.
SAME: dict[Any, Any] = {
    getattr(torch.ops.fmapper, name).default: getattr(torch.ops.aten, name).input
    for name in _OPERATIONS
}


def stand_in(func: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """Returns the function to call instead of a recurrent network over a varying length."""
    operation = _OPERATIONS.get(getattr(func, "__name__", ""))
    if operation is None or len(args) != _INPUTS or args[0].ndim != 3:
        return func
    batch_first = args[-1]
    return operation if isinstance(args[0].shape[int(batch_first)], torch.SymInt) else func


_INPUTS = 9  # the number of arguments for padded sequences
