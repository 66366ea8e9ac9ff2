"""The configuration beside weights: `config.json`, and the quantisation that it states."""

from __future__ import annotations

from typing import Any

from fmapper.errors import CheckpointError
from fmapper.files.bounded_json import read_json, read_json_file
from fmapper.files.untrusted import Misfit
from fmapper.files.urls import Place, Url

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
_OF_LANGUAGE = "text_config"  # a part of the configuration that may state it instead
_MOST_SETTINGS = 20_000_000  # bytes of a configuration


def read_settings(path: Place) -> dict[str, Any]:
    """Reads a configuration: a JSON object within bounds.

    Raises:
        CheckpointError: The file is not one.
    """
    try:
        settings = (
            _read_url(path) if isinstance(path, Url) else read_json_file(path, _MOST_SETTINGS)
        )
        if type(settings) is not dict:
            raise Misfit("is not an object")
    except (Misfit, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return settings


def _read_url(url: Url) -> Any:
    size = url.size()
    if size > _MOST_SETTINGS:
        raise Misfit("is too long")
    try:
        return read_json(url.read_range(0, size).decode())
    except UnicodeDecodeError:
        raise Misfit("is not text") from None


def split_quantization(
    settings: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Splits a configuration into the rest and the quantisation that it states, or None."""
    plain = {key: value for key, value in settings.items() if key != QUANTIZATION}
    quantization = settings.get(QUANTIZATION)
    inner = settings.get(_OF_LANGUAGE)
    if isinstance(inner, dict):
        plain[_OF_LANGUAGE] = {key: x for key, x in inner.items() if key != QUANTIZATION}
        quantization = inner.get(QUANTIZATION) if quantization is None else quantization
    return plain, quantization if isinstance(quantization, dict) else None
