"""Example inputs for a model of transformers, from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

_ROWS, _TOKENS = 2, 8
_SAMPLES = 16_000  # a second of sound
_FRAMES = 3000  # of a spectrogram, as Whisper has them


def example_kwargs(model: Any) -> dict[str, torch.Tensor]:
    """Makes example inputs: tokens and mask, images, audio; empty where unknown."""
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    found: dict[str, torch.Tensor] = {}
    if "input_ids" in names:
        size = _find(config, "vocab_size", default=100)
        generator = torch.Generator().manual_seed(0)
        shape = (_ROWS, _TOKENS)
        high = max(2, min(size, _least_special(config, size)))
        found["input_ids"] = torch.randint(1, high, shape, generator=generator)
        if "attention_mask" in names:
            found["attention_mask"] = torch.ones(shape, dtype=torch.int64)
        if config.is_encoder_decoder and "decoder_input_ids" in names:
            found["decoder_input_ids"] = torch.randint(1, high, shape, generator=generator)
    elif "pixel_values" in names:
        side = _find(config, "image_size", default=224)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        channels = _find(config, "num_channels", default=3)
        found["pixel_values"] = torch.randn(_ROWS, channels, height, width)
    elif "input_values" in names:
        found["input_values"] = torch.randn(_ROWS, _SAMPLES)
    elif "input_features" in names:
        frames = 2 * _find(config, "max_source_positions", default=_FRAMES // 2)
        bins = _find(config, "num_mel_bins", default=80)
        found["input_features"] = torch.randn(_ROWS, bins, frames)
        if config.is_encoder_decoder and "decoder_input_ids" in names:
            found["decoder_input_ids"] = torch.ones(_ROWS, _TOKENS, dtype=torch.int64)
    dtype = model.dtype
    return {n: x.to(dtype) if x.is_floating_point() else x for n, x in found.items()}


def sizes_that_vary(examples: Mapping[str, torch.Tensor]) -> Any:
    """Returns the sizes that vary: all of tokens, and the number of images and sounds."""
    if any(not example.is_floating_point() for example in examples.values()):
        return "auto"
    return {name: ", ".join(["batch", *"_" * (x.ndim - 1)]) for name, x in examples.items()}


def _find(config: Any, name: str, default: Any) -> Any:
    for where in (
        config,
        getattr(config, "text_config", None),
        getattr(config, "vision_config", None),
    ):
        value = getattr(where, name, None)
        if value is not None:
            return value
    return default


def _least_special(config: Any, size: int) -> int:
    """Returns a bound on tokens that are not placeholders of images and the like."""
    special = [
        value
        for name, value in config.to_dict().items()
        if name.endswith("_token_id") and isinstance(value, int) and value > size // 2
    ]
    return min(special, default=size)
