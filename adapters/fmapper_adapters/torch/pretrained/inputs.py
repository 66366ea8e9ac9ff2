"""Example inputs for a model of transformers, from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_ROWS, _TOKENS = 2, 8
_SAMPLES = 16_000  # a second of sound
_FRAMES = 3000  # frames of a spectrogram, as in Whisper
_FEW_FRAMES = 64
_PLACEHOLDERS = ("image_token", "audio_token", "video_token")


def example_kwargs(model: Any) -> dict[str, torch.Tensor]:
    """Makes example inputs: tokens and mask, images, audio; empty where unknown.

    A model of text and images gets both, unless images replace placeholders among its tokens: then
        text alone is a valid input.
    """
    names = dict(inspect.signature(model.forward).parameters)
    config = model.config
    inputs: dict[str, torch.Tensor] = {}
    if "input_ids" in names:
        inputs |= _text(config, names)
    for name, make in _MEDIA.items():
        if name in names and _is_wanted(name, config, names):
            inputs[name] = make(config)
            break
    if config.is_encoder_decoder:
        if "decoder_input_ids" in names:
            inputs["decoder_input_ids"] = _tokens(config)
        if "decoder_input_values" in names:  # a spectrogram to be predicted
            inputs["decoder_input_values"] = torch.randn(
                _ROWS, _TOKENS, _find(config, "num_mel_bins", default=80)
            )
    dtype = model.dtype
    return {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}


def _is_wanted(name: str, config: Any, names: Mapping[str, inspect.Parameter]) -> bool:
    """Returns whether a model needs a medium in addition to text, or instead of it."""
    if "input_ids" not in names or names[name].default is inspect.Parameter.empty:
        return True
    if name == "pixel_values":
        return (
            _placeholder(config) is None and _find(config, "image_size", default=None) is not None
        )
    return hasattr(config, "audio_config") and _placeholder(config) is None


def _text(config: Any, names: Mapping[str, inspect.Parameter]) -> dict[str, torch.Tensor]:
    tokens = _tokens(config)
    place, count = _placeholder(config), getattr(config, "num_query_tokens", None)
    pictures = names.get("pixel_values")
    if place and count and pictures and pictures.default is inspect.Parameter.empty:
        tokens = torch.cat([torch.full((_ROWS, count), place), tokens], 1)
    inputs = {"input_ids": tokens}
    if "attention_mask" in names:
        inputs["attention_mask"] = torch.ones_like(tokens)
    return inputs


def _tokens(config: Any) -> torch.Tensor:
    size = _find(config, "vocab_size", default=100)
    high = max(2, min(size, _least_special(config, size)))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, high, (_ROWS, _TOKENS), generator=generator)


def _pictures(config: Any) -> torch.Tensor:
    side = _find(config, "image_size", default=224)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = _find(config, "num_channels", default=3)
    frames = _find(config, "num_frames", default=None)
    shape = (channels, height, width) if frames is None else (frames, channels, height, width)
    return torch.randn(_ROWS, *shape)


def _sound(config: Any) -> torch.Tensor:
    bins = getattr(config, "num_mel_bins", None)
    if bins and hasattr(config, "time_stride"):  # patches of a spectrogram
        return torch.randn(_ROWS, config.max_length, bins)
    channels = getattr(config, "audio_channels", None)
    shape = (_SAMPLES,) if channels is None else (channels, _SAMPLES)
    return torch.randn(_ROWS, *shape)


def _spectrogram(config: Any) -> torch.Tensor:
    for name in ("input_feat_per_channel", "feature_projection_input_dim"):
        width = getattr(config, name, None)
        if width is not None:
            width *= getattr(config, "input_channels", 1)
            return torch.randn(_ROWS, _FEW_FRAMES, width)
    bins = _find(config, "num_mel_bins", default=80)
    size = _find(config, "spec_size", default=None)
    if size is not None:  # an image of this size, with one channel
        return torch.randn(_ROWS, 1, size * (size // bins), bins)
    frames = 2 * _find(config, "max_source_positions", default=_FRAMES // 2)
    return torch.randn(_ROWS, bins, frames)


def _patches(config: Any) -> torch.Tensor:
    side = _find(config, "patch_size", default=16)
    return torch.ones(_ROWS, 2 * _TOKENS, 2 + 3 * side * side)  # row, column, and pixels


_MEDIA: dict[str, Callable[[Any], torch.Tensor]] = {
    "pixel_values": _pictures,
    "input_values": _sound,
    "input_features": _spectrogram,
    "flattened_patches": _patches,
}


def sizes_that_vary(examples: Mapping[str, torch.Tensor]) -> Any:
    """Returns the sizes that vary: all sizes of tokens, and the number of images and sounds."""
    if any(not example.is_floating_point() for example in examples.values()):
        return "auto"
    return {name: ", ".join(["batch", *"_" * (x.ndim - 1)]) for name, x in examples.items()}


def _find(config: Any, name: str, default: Any) -> Any:
    for where in _parts(config):
        value = getattr(where, name, None)
        if value is not None:
            return value
    return default


def _parts(config: Any) -> Iterator[Any]:
    """Yields a configuration, and those of its submodels for text, images and audio."""
    yield config
    for name in ("text_config", "vision_config", "audio_config", "backbone_config"):
        inner = getattr(config, name, None)
        if inner is not None:
            yield inner


def _placeholder(config: Any) -> int | None:
    """Returns the placeholder token for images or audio; None without one."""
    for name in _PLACEHOLDERS:
        for ending in ("_id", "_index"):
            value = getattr(config, name + ending, None)
            if isinstance(value, int):
                return value
    return None


def _least_special(config: Any, size: int) -> int:
    """Returns a bound below which tokens are not placeholders of images and the like."""
    special = [
        value
        for name, value in config.to_dict().items()
        if name.endswith("_token_id") and isinstance(value, int) and value > size // 2
    ]
    return min(special, default=size)
