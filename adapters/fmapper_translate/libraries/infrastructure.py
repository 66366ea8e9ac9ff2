"""Infrastructure of libraries that models are written with, and what a file has in its place.

Code of `transformers` outside its models is of the library: saving and loading, devices, caches of
generation, decorators. It is not written to a file. What a model needs of it has a counterpart,
and arguments that only it uses are left out.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

_LIBRARY = "transformers"
RECORD = "ModelOutput"  # the class of records, which are dicts in the library
MODULE = "Module"  # the class of the target's modules
# Modules of the library that are written like a model's, though they are not in `models`.
_OF_MODELS = (
    "models.", "modeling_outputs.", "modeling_rope_utils.", "pytorch_utils.", "time_series_utils.",
    "integrations.moe.",
)  # fmt: skip
_NOT_OF_MODELS = "models.auto."
# Names of modules -> names of theirs -> what a file has for them.
_COUNTERPARTS = {
    "modeling_utils": {"PreTrainedModel": "PreTrainedModel"},
    "modeling_layers": {"GradientCheckpointingLayer": MODULE},
    "utils.generic": {"ModelOutput": "ModelOutput"},
    "activations": {
        "ACT2FN": "ACT2FN", "get_activation": "get_activation", "gelu": "get_activation('gelu')",
    },
    "masking_utils": {
        name: name
        for name in (
            "create_recurrent_attention_mask", "create_causal_mask",
            "create_sliding_window_causal_mask", "create_chunked_causal_mask",
            "create_bidirectional_mask", "create_bidirectional_sliding_window_mask",
        )
    },
}  # fmt: skip
# Fields of a configuration that counterparts read.
FIELDS = {
    "create_sliding_window_causal_mask": "sliding_window",
    "create_bidirectional_sliding_window_mask": "sliding_window",
    "create_chunked_causal_mask": "attention_chunk_size",
}
# Names of what is of generation, of what a model returns besides, or of how it is computed; left
# out where they are None, a bool or 0.
LEFT_OUT = frozenset({
    "past_key_values", "past_key_value", "layer_past", "past", "use_cache", "cache_params",
    "cache_position", "past_seen_tokens", "past_key_values_length", "past_length", "is_updated",
    "curr_past_key_values", "curr_past_key_value", "current_past_key_values", "presents",
    "output_attentions", "output_hidden_states", "return_dict", "all_hidden_states",
    "all_attentions", "all_self_attentions", "all_cross_attentions", "head_mask",
    "layer_head_mask", "cross_attn_head_mask", "gradient_checkpointing", "labels",
    "allow_is_causal_skip",
})  # fmt: skip
INITIALIZATION = f"{_LIBRARY}.initialization"  # its functions that give arrays first values
RANGES = ("initializer_range", "init_std", "initializer_factor")  # of configurations, for these
SETTING = "_attn_implementation"  # the same for all that are recorded
_EXPERTS = "_experts_implementation"


def is_of_library(module: str) -> bool:
    """Returns whether a module is infrastructure of a library."""
    first, _, rest = module.partition(".")
    if first != _LIBRARY:
        return False
    is_model = f"{rest}.".startswith(_OF_MODELS) and not f"{rest}.".startswith(_NOT_OF_MODELS)
    return not is_model or rest.rpartition(".")[2].startswith("configuration_")


def is_library(module: str) -> bool:
    """Returns whether a module is of a library, its models included."""
    return module.partition(".")[0] == _LIBRARY


def is_foreign(module: str) -> bool:
    """Returns whether a module is of a library or of PyTorch."""
    return is_library(module) or module.startswith("torch.")


def is_file_of_library(path: Path) -> bool:
    """Returns whether a file of a package is such a module."""
    parts = path.with_suffix("").parts
    if "site-packages" not in parts:
        return False
    return is_of_library(".".join(parts[parts.index("site-packages") + 1 :]))


def counterpart_of(value: Any) -> str | None:
    """Returns what a file has for an object of a library, if it has something for it."""
    for module, names in _COUNTERPARTS.items():
        space = vars(sys.modules.get(f"{_LIBRARY}.{module}", object))
        for name, ours in names.items():
            if space.get(name) is value:
                return ours
    return None


def is_nothing(value: Any) -> bool:
    """Returns whether something that may be left out is left out."""
    return value is None or isinstance(value, bool) or (type(value) is int and value == 0)


def is_message(callee: Any) -> bool:
    """Returns whether something that is called warns or logs."""
    is_of_logging = getattr(callee, "__module__", None) in ("logging", "warnings", "_warnings")
    return is_of_logging or getattr(callee, "__name__", "") == "_log_api_usage_once"


def lacks(cls: type) -> bool:
    """Returns whether a file has nothing for a class of a library, such as a mixin."""
    return is_of_library(cls.__module__) and counterpart_of(cls) is None


def shorten(document: str) -> str:
    """Returns the first paragraph of a docstring; the rest is on the library's page of it."""
    return inspect.cleandoc(document).split("\n\n")[0]


def is_config(value: Any) -> bool:
    """Returns whether something is a configuration of a library."""
    return is_config_class(type(value))


def is_config_class(cls: type) -> bool:
    """Returns whether a class is one of configurations of a library."""
    module = sys.modules.get(f"{_LIBRARY}.configuration_utils")
    return module is not None and issubclass(cls, module.PreTrainedConfig)


def ties(part: nn.Module) -> bool:
    """Returns whether a part is a model of a library, which ties its arrays when it is complete."""
    module = sys.modules.get(f"{_LIBRARY}.modeling_utils")
    return module is not None and isinstance(part, module.PreTrainedModel)


def is_record(cls: type) -> bool:
    """Returns whether a class is one of records that models return."""
    module = sys.modules.get(f"{_LIBRARY}.utils.generic")
    return module is not None and issubclass(cls, module.ModelOutput)


def prepare(value: Any) -> Any:
    """Returns an argument as a model is recorded with: in the model's own code, and no caches."""
    if not is_config(value):
        return value
    config = copy.deepcopy(value)
    setattr(config, SETTING, "eager")
    setattr(config, _EXPERTS, "batched_mm")  # whose shapes do not depend on values
    for inner in _configs_in(config):
        if hasattr(inner, "use_cache"):
            inner.use_cache = False
    return config


@contextlib.contextmanager
def masks_traced() -> Iterator[None]:
    """Has the library make masks as it does for a compiler: none depends on values of another."""
    masking = sys.modules.get(f"{_LIBRARY}.masking_utils")
    if masking is None:
        yield
        return
    with mock.patch.object(masking, "is_tracing", return_value=True):
        yield


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Has a model return no caches and have no sparse buffers, as its file; those are not saved."""
    sparse = [
        (part, name, buffer)
        for part in model.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if buffer.is_sparse and name not in part.state_dict()
    ]
    configs = {
        id(inner): inner
        for part in model.modules()
        if is_config(config := getattr(part, "config", None))
        for inner in _configs_in(config)
    }
    before = [
        (config, config.use_cache) for config in configs.values() if hasattr(config, "use_cache")
    ]
    for config, _ in before:
        config.use_cache = False
    for part, name, _ in sparse:
        delattr(part, name)
    try:
        yield
    finally:
        for part, name, buffer in sparse:
            part.register_buffer(name, buffer, persistent=False)
        for config, use_cache in before:
            config.use_cache = use_cache


def _configs_in(config: Any) -> list[Any]:
    return [config, *(getattr(config, name) for name in config.sub_configs)]
