"""Rotary embeddings whose frequencies depend on the length of the text, without state.

In transformers they keep the frequencies of the last call in a buffer, and check in Python whether
the text has become longer. The equivalent function of the length is recorded instead.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def without_memory(model: torch.nn.Module) -> Iterator[None]:
    """Makes frequencies depend on the length of the text alone, within the block."""
    changed = [module for module in model.modules() if _depends_on_length(module)]
    for module in changed:
        module.forward = functools.partial(_embed, module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _depends_on_length(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None)
    each = kinds.values() if isinstance(kinds, dict) else (kinds,)
    is_scaled = any(isinstance(kind, str) and _is_scaled(kind) for kind in each)
    return is_scaled and "forward" not in vars(module)


def _is_scaled(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


class _With:
    """A module with one attribute replaced."""

    def __init__(self, module: Any, name: str, value: Any) -> None:
        self._module = module
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@torch.no_grad()
def _embed(module: Any, x: Any, position_ids: Any, layer_type: str | None = None) -> Any:
    """Returns sines and cosines of positions."""
    forward = inspect.unwrap(type(module).forward)  # without the wrapper that keeps frequencies
    named = {} if layer_type is None else {"layer_type": layer_type}
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if not _is_scaled(kind):
        return forward(module, x, position_ids, **named)
    prefix = "" if layer_type is None else f"{layer_type}_"
    length = position_ids.max() + 1
    frequencies = _frequencies(module, kind, length, layer_type, prefix)
    return forward(_With(module, f"{prefix}inv_freq", frequencies), x, position_ids, **named)


def _frequencies(
    module: Any, kind: str, length: Any, layer_type: str | None, prefix: str
) -> torch.Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute: Any = functools.partial(
        ROPE_INIT_FUNCTIONS[kind], module.config, length.device, layer_type=layer_type
    )
    if "dynamic" in kind:
        scaled: torch.Tensor = compute(seq_len=length)[0]
        return scaled
    parameters = module.config.rope_parameters
    layer_parameters = parameters if layer_type is None else parameters[layer_type]
    usual = layer_parameters["original_max_position_embeddings"]
    short = getattr(module, f"{prefix}original_inv_freq")
    return torch.where(length > usual, compute(seq_len=usual + 1)[0], short)
