"""Reads a folder in the Hub's layout: a class of transformers and its configuration, no code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fmapper import CheckpointError
from fmapper.checkpoints import (
    LazyArray,
    Pretrained,
    file_in,
    read_settings,
    split_quantization,
)
from fmapper_adapters.torch._private import make_pretrained_class
from fmapper_adapters.torch.pretrained import inputs
from fmapper_adapters.torch.pretrained.limits import Computed, Parameters, Weights, check_sizes
from fmapper_adapters.torch.pretrained.tables import transformers_rules

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_CODE = {"auto_map", "custom_pipelines", "trust_remote_code", "use_kernels"}
_MOST_TEXT = 100_000_000  # bytes of a file next to the weights
_FLOATS = ("Infinity", "-Infinity", "NaN")
_TEXTS = (
    _CONFIG,
    _GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)


def read(folder: Path, dtype: str | None, arrays: Mapping[str, LazyArray]) -> Pretrained | None:
    """Reads a folder; returns None without a configuration of transformers.

    Raises:
        CheckpointError: The class is not in transformers, or the folder is damaged.
    """
    if not (folder / _CONFIG).is_file():
        return None
    settings, quantization = split_quantization(read_settings(file_in(folder, _CONFIG)))
    kind = settings.get("model_type")
    if not isinstance(kind, str):
        return None
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{folder / _CONFIG}: model_type {kind[:60]!r} is not in the installed transformers "
            f"({transformers.__version__}). Code that comes with a folder is not executed: update "
            "transformers, or create the module yourself and use fmapper.load(folder, like=module)."
        )
    weights = Weights.of(folder, arrays)
    check_sizes(folder / _CONFIG, settings, weights)
    try:
        config = CONFIG_MAPPING[kind].from_dict(_without_code(settings))
        cls = _class(folder, settings, config)
        wanted = dtype or _dtype(settings)
        with Computed(folder / _CONFIG, weights):
            count = Parameters(folder / _CONFIG, weights)
            model = _without_memory(cls, config, wanted, count)
        _set_generation(model, folder)
        config.name_or_path = str(folder)  # as in transformers
        with Computed(folder / _CONFIG, weights):
            examples = inputs.example_kwargs(model)
    except CheckpointError:
        raise
    except Exception as error:  # the class may raise anything for odd settings
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        raise CheckpointError(
            f"{folder / _CONFIG}: transformers cannot create a model from it: {reason}"
        ) from error
    beside = _places_of_texts(folder)
    return Pretrained(
        model,
        "torch",
        examples,
        inputs.sizes_that_vary(examples),
        partial(transformers_rules, model),
        partial(transformers_rules, model, back=True),
        _matcher(getattr(model, "_keys_to_ignore_on_load_missing", None)),
        _matcher(getattr(model, "_keys_to_ignore_on_load_unexpected", None)),
        quantization,
        partial(_texts, beside, {**settings, "dtype": wanted}),
        model.state_dict().keys(),  # an LSTM also lists its weights
    )


def _without_code(settings: Any) -> Any:
    """Drops settings that would make transformers fetch or import code.

    Kernels for attention and experts may be repositories of the Hub.
    """
    if isinstance(settings, list):
        return [_without_code(value) for value in settings]
    if not isinstance(settings, dict):
        return settings
    if set(settings) == {"__float__"} and settings["__float__"] in _FLOATS:
        return float(settings["__float__"])  # transformers' form of values that JSON lacks
    return {
        name: _without_code(value)
        for name, value in settings.items()
        if name not in _CODE and "implementation" not in name and "kernel_config" not in name
    }


def _class(folder: Path, settings: dict[str, Any], config: Any) -> Any:
    """Returns the class of transformers that a configuration names."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    names = settings.get("architectures") or []
    base: Any = transformers.PreTrainedModel  # subclasses only: its own instances break these
    for name in names if isinstance(names, list) else []:
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base:
            return cls
    if type(config) in MODEL_MAPPING and not names:
        return MODEL_MAPPING[type(config)]
    raise CheckpointError(
        f"{folder / _CONFIG}: architectures {str(names)[:80]} is not a class of the installed "
        f"transformers ({transformers.__version__}). Make the module yourself and use "
        "fmapper.load(folder, like=module)."
    )


def _set_generation(model: Any, folder: Path) -> None:
    """Sets the generation config of a model from its folder, if there is one."""
    if not (folder / _GENERATION).is_file() or not model.can_generate():
        return
    from transformers import GenerationConfig

    settings = _without_code(read_settings(file_in(folder, _GENERATION)))
    try:
        model.generation_config = GenerationConfig.from_dict(settings)
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # one per setting
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"{folder / _GENERATION}: {reason}") from None


def _dtype(settings: dict[str, Any]) -> str:
    """Returns the dtype of the weights in a configuration."""
    inner = settings.get("text_config") or {}
    for value in (settings.get("dtype"), settings.get("torch_dtype"), inner.get("dtype")):
        name = str(value).removeprefix("torch.")
        if isinstance(getattr(torch, name, None), torch.dtype):
            return name
    return "float32"


def _without_memory(cls: Any, config: Any, dtype: str, count: Parameters) -> torch.nn.Module:
    """Creates a module with abstract parameters and real buffers."""
    with _parameters_on_meta(count):
        model = make_pretrained_class(cls, config, getattr(torch, dtype))
    return model.eval()


@contextmanager
def _parameters_on_meta(count: Parameters) -> Iterator[None]:
    """Lets modules register abstract parameters within the block.

    Initialisation then has no effect; buffers are computed as usual.
    """
    module_class: Any = torch.nn.Module
    register = module_class.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            new = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            vars(new).update(vars(parameter))
            parameter = new
            count.add(new.numel())
        register(module, name, parameter)

    module_class.register_parameter = on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register


def _matcher(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    """Returns a function that matches names with a class's patterns."""
    expressions = [re.compile(pattern) for pattern in patterns or ()]
    return lambda name: any(pattern.search(name) for pattern in expressions)


def _places_of_texts(folder: Path) -> dict[str, Path]:
    """Returns the text files next to the weights, by name."""
    return {
        name: file_in(folder, name)
        for name in _TEXTS
        if (folder / name).is_file() and (folder / name).stat().st_size <= _MOST_TEXT
    }


def _texts(places: Mapping[str, Path], settings: dict[str, Any]) -> dict[str, str]:
    """Reads the text files next to the weights; the configuration is written from `settings`."""
    texts = {}
    for name, path in places.items():
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: is not text") from None
    return {**texts, _CONFIG: json.dumps(settings, indent=2) + "\n"}
