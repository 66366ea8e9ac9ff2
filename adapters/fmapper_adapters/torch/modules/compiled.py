"""The arrays of modules that `torch.compile` wraps, by their names in the unwrapped module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fmapper import KeyPath, fmap, fmap_with_path
from fmapper_adapters.torch.modules.module_nodes import is_compiled


def weights(model: Any) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
    """Returns the arrays of a module with compiled submodules, and a function that replaces them.

    Returns None for other models.
    """
    if not isinstance(model, torch.nn.Module):
        return None
    wrappers = {
        tuple(path.split(".") if path else ())
        for path, part in model.named_modules(remove_duplicate=False)
        if is_compiled(type(part))
    }
    if not wrappers:
        return None
    arrays: dict[str, torch.Tensor] = {}

    def note(path: KeyPath, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            keys = [str(key) for key in path]
            kept = [key for at, key in enumerate(keys) if (*keys[:at],) not in wrappers]
            arrays[".".join(kept)] = leaf
        return leaf

    fmap_with_path(note, model, cache=None)

    def back(filled: Mapping[str, Any]) -> Any:
        new = {id(array): filled[name] for name, array in arrays.items()}
        return fmap(lambda leaf: new.get(id(leaf), leaf), model)

    return arrays, back
