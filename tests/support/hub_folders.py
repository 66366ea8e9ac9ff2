"""What transformers writes to a folder, and whether rules give the same."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fmapper.checkpoints import LazyArray, Rules
from fmapper_adapters.torch._private import names_not_to_save
from fmapper_adapters.torch.pretrained.tables import transformers_rules


def numpy_of(tensor: Any) -> np.ndarray[Any, Any]:
    import ml_dtypes
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def saved(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors that `save_pretrained` writes."""
    from safetensors import safe_open

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= {name: numpy_of(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return found


def difference(
    got: Mapping[str, LazyArray], wanted: Mapping[str, np.ndarray[Any, Any]]
) -> str | None:
    """The first difference between arrays by name, in bits; None if there is none."""
    if got.keys() != wanted.keys():
        missing, more = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
        return f"missing {missing[:3]}, more {more[:3]}"
    for name, array in wanted.items():
        found = got[name].read()
        if (found.shape, found.dtype) != (array.shape, array.dtype):
            return f"{name}: {found.dtype}{found.shape}, not {array.dtype}{array.shape}"
        if found.tobytes() != np.ascontiguousarray(array).tobytes():
            return f"{name}: other values"
    return None


def rules_against_transformers(
    model: Any, folder: dict[str, np.ndarray[Any, Any]]
) -> tuple[Rules, str | None]:
    """The rules of a model and what was saved of it, and what is not as transformers has it."""
    state = {name: numpy_of(tensor) for name, tensor in model.state_dict().items()}
    rules = transformers_rules(model, folder)
    loaded = rules.apply(folder)
    left_out = names_not_to_save(model)  # sinusoids, which the class computes
    ways = {
        "forward": (loaded, {name: x for name, x in state.items() if name not in left_out}),
        "back": (transformers_rules(model, back=True).apply(state), folder),
        "inverse": (rules.inverse().apply(loaded), folder),
    }
    for way, (got, wanted) in ways.items():
        wrong = difference(got, wanted)
        if wrong:
            return rules, f"{way}: {wrong}"
    if rules != transformers_rules(model):
        return rules, "other rules for what is written than for the folder"
    if len(rules) and Rules.from_toml(rules.to_toml()) != rules:
        return rules, "other rules from TOML"
    return rules, None
