"""The tables of transformers as rules: how a folder's arrays become those of a model, and back.

The tables are not copied here. transformers' own functions run on tensors without memory that stand
for the arrays, and their operations are recorded. So rules support all that transformers can load
and save.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fmapper import CheckpointError
from fmapper.checkpoints import LazyArray, Named, Rules, derive_rules, numpy_dtype
from fmapper_adapters.torch._private import names_not_to_save
from fmapper_adapters.torch.checkpoints.recording import TorchRecorder

_PREFIX = "transformers.models."


def transformers_rules(
    model: Any, arrays: Mapping[str, Any] | None = None, *, back: bool = False
) -> Rules:
    """Returns rules from a folder of the Hub to a model of transformers, or back.

    They are derived from `transformers.conversion_mapping`, and need neither transformers nor the
    model when they are applied. No value is read.

    Args:
        model: The model, which may be on the meta device; a configuration, for which a model is
            created there; or a model type such as `"qwen3_moe"`, in its default size.
        arrays: The arrays in the folder by name, as anything with a shape; None for the arrays that
            `save_pretrained` writes.
        back: Whether the rules go from the model's `state_dict()` to the folder.

    Returns:
        The rules. Arrays of the folder that the model does not have are dropped; tied arrays that
        the folder lacks are tied. Dtypes do not change. Arrays that a folder never has, such as
        sinusoids, are computed by the model.

    Raises:
        CheckpointError: transformers changes the arrays in a way that rules cannot express.
        ValueError: The model is not from transformers.
    """
    made = _model(model)
    state = made.state_dict()
    if back:
        return _rules_back(made, state)
    if arrays is None:
        saved = _rules_back(made, state).apply(_as_lazy(state))
        return _rules_forward(made, state, saved)
    return _rules_forward(made, state, arrays)


def _as_lazy(tensors: Mapping[str, torch.Tensor]) -> dict[str, LazyArray]:
    return {name: LazyArray.full(tuple(x.shape), 0, "uint8") for name, x in tensors.items()}


def _model(model: Any) -> Any:
    """Returns the model of a configuration or model type, without memory."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        return model
    import transformers

    config = transformers.AutoConfig.for_model(model) if isinstance(model, str) else model
    if not isinstance(config, transformers.PreTrainedConfig):
        raise ValueError(
            f"{type(model).__name__} is not a model of transformers, nor its configuration"
        )
    names = config.architectures or ()
    cls = getattr(transformers, names[0], None) if names else None
    if isinstance(cls, type) and cls.__module__.startswith(_PREFIX):  # only classes of transformers
        with torch.device("meta"):
            return cls(config)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def _rules_forward(model: Any, state: dict[str, Any], arrays: Mapping[str, Any]) -> Rules:
    """Follows `transformers.core_model_loading.convert_and_load_state_dict_in_model`."""
    from transformers import conversion_mapping, core_model_loading

    mapping = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, core_model_loading.WeightRenaming)]
    converters = [
        entry for entry in mapping if isinstance(entry, core_model_loading.WeightConverter)
    ]
    of_pattern = {name: entry for entry in converters for name in entry.source_patterns}
    prefix = model.base_model_prefix
    conversions: dict[str, Any] = {}
    recorder = TorchRecorder()
    for name in sorted(arrays, key=core_model_loading.dot_natural_key):
        new, pattern = core_model_loading.rename_source_key(
            name, renamings, converters, prefix, state
        )
        if new not in state and name in state:
            new, pattern = core_model_loading.rename_source_key(name, [], [], prefix, state)
        if new not in state:
            continue
        if pattern is not None:
            conversion = conversions.setdefault(new, copy.deepcopy(of_pattern[pattern]))
        else:
            pattern = name
            conversion = conversions.setdefault(new, core_model_loading.WeightRenaming(name, new))
        leaf = recorder.stand_in(_leaf(name, arrays[name].shape, state[new].dtype))
        conversion.add_tensor(new, name, pattern, leaf)
    outputs: dict[str, LazyArray] = {}
    for new, conversion in conversions.items():
        made = recorder.run(partial(conversion.convert, new, model=model, config=model.config))
        for target, value in made.items():
            tensor = value[0] if isinstance(value, list) else value
            if target in state:
                outputs[target] = _array_of(recorder, tensor)
    return derive_rules(outputs, list(arrays), _ties(model, outputs, state))


def _leaf(name: str, shape: Sequence[int], dtype: torch.dtype) -> Named:
    return Named(name, shape, numpy_dtype(str(dtype).removeprefix("torch.")))


def _array_of(recorder: TorchRecorder, tensor: torch.Tensor) -> LazyArray:
    array = recorder.lazy(tensor)
    if array is None:
        raise CheckpointError("transformers makes an array that depends on none of the folder")
    return array


def _ties(model: Any, outputs: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tied names that are missing, each with the one that exists."""
    groups: dict[int, list[str]] = {}
    for name in state:
        groups.setdefault(_identity(model, name), []).append(name)
    ties = {}
    for names in groups.values():
        present = [name for name in names if name in outputs]
        ties.update({name: present[0] for name in names if present and name not in outputs})
    return ties


def _identity(model: Any, name: str) -> int:
    try:
        return id(model.get_parameter_or_buffer(name))
    except AttributeError:  # extra state
        return id(name)


def _rules_back(model: Any, state: Mapping[str, torch.Tensor]) -> Rules:
    """Follows `transformers.PreTrainedModel.save_pretrained`."""
    from transformers import core_model_loading

    kept = dict(state)
    for name in names_not_to_save(model):
        kept.pop(name, None)
    groups: dict[int, list[str]] = {}
    for name in kept:
        groups.setdefault(_identity(model, name), []).append(name)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for names in groups.values():
        targets = [name for name in sorted(names) if name in tied]
        for name in targets[: len(names) - 1] if len(names) > 1 else ():
            del kept[name]
    recorder = TorchRecorder()
    leaves = {name: recorder.stand_in(_leaf(name, x.shape, x.dtype)) for name, x in kept.items()}
    made = recorder.run(partial(core_model_loading.revert_weight_conversion, model, leaves))
    outputs = {name: _array_of(recorder, tensor) for name, tensor in made.items()}
    return derive_rules(outputs, list(state))
